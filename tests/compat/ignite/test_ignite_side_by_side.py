"""The original and the drop-in on the same inputs, in the same ranks: they agree, or the original cannot.

In programs, for to import Ignite in every rank takes longer than a test body may.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lanes import variants
from tests.session.worlds import free_port, plain, run_ranks

PROGRAM = str(Path(__file__).parents[1] / "programs" / "ignite_side_by_side.py")


@pytest.mark.parametrize("size", variants([0, 1, 2, 4], slow=[2]), ids="{} joined".format)
def test_original_and_drop_in_agree(size: int) -> None:
    port = free_port()
    environs = [plain(rank, size, port, LOCAL_RANK=str(rank)) for rank in range(size)] or [{}]
    for ended in run_ranks(PROGRAM, environs):
        assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr
