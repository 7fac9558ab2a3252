"""Ranks in messages: all of few, and the first ones of thousands."""

from __future__ import annotations

from rankwise._comm.control.protocol import Description, mismatch_error
from rankwise._text import ranks_on_hosts_text, ranks_text


def test_ranks_in_ranges() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert ranks_text(range(0, 40, 2)).endswith("12, 14 and 12 more")


def test_ranks_on_hosts() -> None:
    hosts = {rank: f"node{rank // 2}" for rank in range(100)}
    assert ranks_on_hosts_text(range(32), hosts).endswith("ranks 30-31 on node15")
    assert ranks_on_hosts_text(range(100), hosts).endswith("ranks 30-31 on node15; 68 more on 34 more hosts")


def test_an_error_of_many_different_calls_is_short() -> None:
    details = [Description("all_reduce", {"step": rank}, site="train.py:7").details() for rank in range(4096)]
    error = str(mismatch_error(range(4096), details))
    assert ", all_reduce(step=15) on rank 15, 4080 more on 4080 more ranks\n" in error
    assert error.endswith("\n  rank 15: all_reduce(step=15) at train.py:7\n  4080 more ranks: 4080 more calls")
