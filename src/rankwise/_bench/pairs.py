"""Which host, or rank of one host, is slow: found in two rounds of exchanges between pairs.

In the first round each has a partner, and all pairs exchange at once. Who was in a fast pair is fast. In the second
round each of the others exchanges with one that is fast, so that a slow pair is theirs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from rankwise._bench.measuring import process_group, timed
from rankwise._collectives.all_gather import all_gather
from rankwise._session.getters import hostname
from rankwise._session.session import Session

_BYTES: Final = 2 << 20
# Of the exchanges of a pair, so many in so many seconds, the fastest counts, which other work disturbs least.
_SECONDS, _FEWEST, _MOST = 0.5, 3, 400
# So many helpers, one after the other, have to find a rank slow in the second round.
_HELPERS: Final = 2

_SIDE: Final = "an exchange of a pair"

Partners: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A pair of ranks, and the bandwidth between them in the slower direction, in GB/s."""

    round: int
    partners: Partners
    bandwidth: float


def members(session: Session) -> dict[int, str]:
    """Return who is compared, by rank: the first rank of each host; on one host, all ranks.

    Collective over the world.
    """
    places = all_gather((session.topology.local_rank, hostname()))
    if session.topology.num_nodes == 1:
        return {rank: f"rank {rank}" for rank in range(len(places))}
    return {rank: f"{host} (rank {rank})" for rank, (local_rank, host) in enumerate(places) if local_rank == 0}


def first_round(ranks: Sequence[int]) -> list[Partners]:
    """Return a pair for each; one that is left over exchanges with the first, and of three each with each.

    Example:
        >>> first_round([0, 1, 2, 3, 4])
        [(0, 1), (2, 3), (4, 0)]
    """
    pairs = list(zip(ranks[::2], ranks[1::2], strict=False))
    if len(ranks) % 2:
        pairs.append((ranks[-1], ranks[0]))
    if len(ranks) == 3:  # else all pairs would be slow if the first is
        pairs.append((ranks[1], ranks[2]))
    return pairs


def fast_members(found: Sequence[Exchange], tolerance: float) -> set[int]:
    """Return who is in a pair that takes at most so much more time than the fastest, as a share."""
    best = max(one.bandwidth for one in found)
    return {rank for one in found if best / one.bandwidth <= 1 + tolerance for rank in one.partners}


def find_slow(session: Session, ranks: Sequence[int], tolerance: float) -> tuple[list[Exchange], list[int]]:
    """Return the exchanges of both rounds, and the ranks that are slow with a partner that is fast.

    Collective over the world.

    Raises:
        RankwiseError: A rank is lost.
    """
    found = list(_exchanges(session, 1, first_round(ranks)))
    helpers = sorted(fast_members(found, tolerance))
    slow = [rank for rank in ranks if rank not in helpers]
    for shift in range(_HELPERS):
        pairs = [(rank, helpers[(number + shift) % len(helpers)]) for number, rank in enumerate(slow)]
        found += _exchanges(session, 2, pairs)
        fast = fast_members(found, tolerance)
        slow = [rank for rank in slow if rank not in fast]
    return found, slow


def _exchanges(session: Session, number: int, pairs: Sequence[Partners]) -> Iterator[Exchange]:
    """Let pairs exchange, at once unless a rank is in several."""
    left = list(pairs)
    while left:
        busy: set[int] = set()
        now = []
        for pair in left:
            if busy.isdisjoint(pair):
                busy.update(pair)
                now.append(pair)
        left = [pair for pair in left if pair not in now]
        forth = _seconds_of(session, now)
        back = _seconds_of(session, [pair[::-1] for pair in now])
        for pair in now:
            slower = max(seconds[rank] for rank in pair for seconds in (forth, back))
            yield Exchange(round=number, partners=pair, bandwidth=_BYTES / slower / 1e9)


def _seconds_of(session: Session, pairs: Sequence[Partners]) -> list[float]:
    """Let the first of each pair send to the second; return how long that took on each rank, 0 on others."""
    pair = next((pair for pair in pairs if session.rank in pair), None)
    if pair is None:
        all_gather(0.0)
        return all_gather(0.0)
    call = partial(_send, process_group(session), *pair, torch.zeros(_BYTES, dtype=torch.uint8, device=session.device))
    timed(_SIDE, call, 1, session.device)
    trials = all_gather(timed(_SIDE, call, _FEWEST, session.device).min().item())
    number = min(max(_FEWEST, int(_SECONDS / max(trials[rank] for rank in pair))), _MOST)
    return all_gather(timed(_SIDE, call, number, session.device).min().item())


def _send(group: dist.ProcessGroup, source: int, target: int, data: torch.Tensor) -> None:
    """Send data one way, and one byte back when it has arrived: the ways of a full queue would slow each other."""
    if group.rank() == source:
        dist.send(data, target, group)
        dist.recv(data[:1], target, group)
    else:
        dist.recv(data, source, group)
        dist.send(data[:1], source, group)
