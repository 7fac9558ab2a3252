"""Ranks as text, for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_RUNS_SHOWN: Final = 8
# Of more hosts, or values, the first ones: of a job of thousands of ranks, a message would have some 100 kB.
MOST_SHOWN: Final = 16
# Why a rank takes part in nothing any more that has done so without an error.
LEFT: Final = "left the session without this call"


def ranks_on_hosts_text(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return "ranks 0-2 on node1; rank 5 on node2", as far as hosts are given; of many hosts the first ones."""
    parts: dict[str, list[int]] = {}
    for rank in ranks:
        parts.setdefault(hosts.get(rank, ""), []).append(rank)
    shown = list(parts.items())[:MOST_SHOWN]
    texts = [f"{ranks_text(there)}{f' on {host}' if host else ''}" for host, there in shown]
    if num_more := num_after(parts):
        texts.append(f"{num_more} more on {len(parts) - MOST_SHOWN} more hosts")
    return "; ".join(texts)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5"; the number of the last ones if there are many."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:_RUNS_SHOWN]]
    num_more = sum(high - low + 1 for low, high in runs[_RUNS_SHOWN:])
    more = f" and {num_more} more" if num_more else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{more}"


def ranks_by_value(ranks: Sequence[int], values: Sequence[str]) -> str:
    """Return "float32[3] on ranks 0-2, float64[3] on rank 3"; of many values the first ones."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    texts = [f"{value} on {ranks_text(holders)}" for value, holders in list(ranks_of.items())[:MOST_SHOWN]]
    if num_more := num_after(ranks_of):
        texts.append(f"{len(ranks_of) - MOST_SHOWN} more on {num_more} more ranks")
    return ", ".join(texts)


def num_after(ranks_of: Mapping[Any, Sequence[int]]) -> int:
    """Return the number of ranks that are not shown, given the ranks of each host or value."""
    return sum(map(len, list(ranks_of.values())[MOST_SHOWN:]))
