"""Another user of this host, who can reach every port on loopback: Rule 9, nothing of theirs is unpickled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from rankwise.testing.environments import fake_torchrun
from tests.session.worlds import run_ranks

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize("how", ["join", "adopt"])
def test_what_another_user_writes_into_the_store_leads_no_rank_to_unpickle_it(how: str, tmp_path: Path) -> None:
    """Also not where somebody else opened the group: ranks of one host take only what comes from their own user."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environs = fake_torchrun(2, address="127.0.0.1", port=store.port, run_id="job")
    ended = run_ranks("intruded.py", [*environs, environs[0] | {"INTRUDER": "1"}], str(tmp_path / "made"), how)
    assert not (tmp_path / "made").exists()
    assert all((process.returncode, process.stderr) == (0, "") for process in ended), ended
    one = ended[1].stdout
    assert not one or "rank 0 cannot be reached" in one, "the intruder came too late, or is told from rank zero"
    assert not one or "it belongs to another user" in one
