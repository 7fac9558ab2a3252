"""Another user of this host, who can reach every port on loopback: Rule 9, nothing of theirs is unpickled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.group import Group
from rankwise._rendezvous.store import wait_for
from rankwise.testing.environments import fake_torchrun
from tests.session.worlds import free_port, garbage_thrown, plain, run_ranks


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("how", ["join", "adopt"])
def test_what_another_user_writes_into_the_store_leads_no_rank_to_unpickle_it(how: str, tmp_path: Path) -> None:
    """Also not where somebody else opened the group: ranks of one host take only what comes from their own user."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environs = fake_torchrun(2, address="127.0.0.1", port=store.port, run_id="job")
    ended = run_ranks("intruded.py", [*environs, environs[0] | {"INTRUDER": "1"}], str(tmp_path / "made"), how)
    assert not (tmp_path / "made").exists()
    assert all((process.returncode, process.stderr) == (0, "") for process in ended), ended
    one = ended[1].stdout
    if how == "adopt" or one:  # else the intruder may have come too late
        assert "rank 0 cannot be reached" in one
        assert "it belongs to another user" in one


@pytest.mark.parametrize(
    ("note", "said"),
    [
        ("[" * 60_000, "cannot be read in the store"),
        ('{"rank": 0}', "cannot be read in the store"),
        (
            '{"rank": 0, "host": "h\\u001b[2J", "raised": "x", "traceback": ""}',
            r"rank 0 on h\\x1b\[2J raised x",
        ),
    ],
)
@pytest.mark.ranks(2)
def test_what_others_write_into_the_store_is_an_error_of_ours(comm: Group, note: str, said: str) -> None:
    """Other users of the host can reach it."""
    internal = comm_of(comm)
    board = internal.shared_store()
    assert board is not None
    key = f"exclusive_section/{internal.num_exclusive_sections + 1}"
    if rw.get_rank() == 1:
        board.set(key, note)
        with pytest.raises(rw.RankwiseError, match=said), rw.rank_zero_first():
            raise AssertionError
        board.set("over", "")
    else:
        internal.call("rank_zero_first", {"local": False}).verify()
        internal.num_exclusive_sections += 1
        assert wait_for(board, ["over"], timeout=100.0)
        for left in (key, f"{key}/readers", "over"):
            board.delete_key(left)


@pytest.mark.soak(100)
def test_ranks_join_while_garbage_is_thrown_at_them(seed: int) -> None:
    """At the meeting, the store, gloo, and the connections of each group, with the last rank late."""
    port = free_port()
    with garbage_thrown(seed):
        ended = run_ranks("harassed.py", [plain(rank, 3, port) for rank in range(3)], "3", "1.0")
    assert [(process.returncode, process.stdout) for process in ended] == [(0, "3\n")] * 3, ended
