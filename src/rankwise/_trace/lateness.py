"""How late each rank came to collectives, by call site. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

# The part of the last call in an average that forgets: after 16 calls, those before have a third of the weight.
_WEIGHT: Final = 1 / 16
_NUM_WORST: Final = 10
# Whoever is late by this part of its mean in half of the calls is late as a rule, and not in a few of them.
_AS_A_RULE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How late a rank came to a call site: after half of the ranks of the group, in seconds.

    Attributes:
        rank: The rank.
        call: The operation and its call site: "all_reduce at train.py:88".
        num_calls: The number of calls.
        recent: The mean, in which recent calls weigh more.
        mean: The mean of all calls.
        worst: The largest, at most ten, in descending order.
        is_chronic: It is late in at least half of the calls; otherwise only in some of them.

    Example:
        >>> from rankwise import Lateness
        >>> late = Lateness(
        ...     rank=3, call="all_reduce at train.py:88", num_calls=200, recent=0.012, mean=0.01, worst=(0.031, 0.02),
        ...     is_chronic=True,
        ... )
        >>> print(late)
        rank 3: 12 ms late as a rule, at most 31 ms, in 200 calls of all_reduce at train.py:88
    """

    rank: int
    call: str
    num_calls: int
    recent: float
    mean: float
    worst: tuple[float, ...]
    is_chronic: bool

    def __str__(self) -> str:
        often = "as a rule" if self.is_chronic else "now and then"
        most = f"at most {milliseconds(self.worst[0])}"
        late = f"{milliseconds(self.recent if self.is_chronic else self.mean)} late {often}"
        return f"rank {self.rank}: {late}, {most}, in {self.num_calls} calls of {self.call}"


def lateness_of(arrivals: Iterable[tuple[Sequence[int], str, Sequence[float]]]) -> list[Lateness]:
    """Return the lateness of each rank at each call site, the largest sum first.

    Args:
        arrivals: The calls, the oldest first: the ranks of the group, the text, and when each of them came, in seconds.
    """
    late: dict[tuple[int, str], list[float]] = {}
    for ranks, call, times in arrivals:
        half = statistics.median_low(times)
        for rank, time in zip(ranks, times, strict=True):
            late.setdefault((rank, call), []).append(max(0.0, time - half))
    found = [_lateness(rank, call, each) for (rank, call), each in late.items()]
    return sorted(found, key=lambda one: -one.mean * one.num_calls)


def _lateness(rank: int, call: str, late: Sequence[float]) -> Lateness:
    recent = 0.0
    for number, each in enumerate(late, 1):
        recent += max(_WEIGHT, 1 / number) * (each - recent)  # at first a mean: the first call is often special
    mean = statistics.fmean(late)
    return Lateness(
        rank=rank,
        call=call,
        num_calls=len(late),
        recent=recent,
        mean=mean,
        worst=tuple(sorted(late, reverse=True)[:_NUM_WORST]),
        is_chronic=mean > 0 and statistics.median(late) >= _AS_A_RULE * mean,
    )


def milliseconds(seconds: float) -> str:
    """Return a duration as text: "0.31 ms", "12 ms"."""
    number = 1000 * seconds
    return f"{number:.0f} ms" if number >= 10 else f"{number:.2g} ms"
