"""A module of which ranks run a part that nobody else does."""

from __future__ import annotations


def of_ranks(rank: int) -> str:
    if rank == 0:
        return "zero"
    return "other"


def of_nobody() -> str:
    return "nobody"
