"""When the ranks of a host came to their last collectives, read by another process from the memory that they share."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from rankwise._rank_files import descriptors_of
from rankwise._trace.lateness import lateness_of

_PAGE: Final = "/memfd:rankwise (deleted)"
# The id of the group of all ranks, as the directory has it.
_ALL_RANKS: Final = 1


def mean_lateness(pid: int, num_ranks: int, place: Mapping[str, int]) -> dict[int, float]:
    """Return for each rank of a job on one host how late it came lately to the collectives of all ranks, in seconds.

    {} for jobs on several hosts, jobs without rankwise, and before the first calls.

    Args:
        pid: One of the ranks.
        num_ranks: The number of ranks.
        place: Where the arrivals are, from `layout.place_of_arrivals`.
    """
    for descriptor, target in descriptors_of(pid).items():
        if target == _PAGE:
            try:
                with open(f"/proc/{pid}/fd/{descriptor}", "rb", buffering=0) as file:  # noqa: PTH123 - no file system
                    calls = _read(file.fileno(), num_ranks, place)
            except (OSError, struct.error):  # it has ended
                continue
            ranks = range(num_ranks)
            return {one.rank: one.recent for one in lateness_of((ranks, "", times) for times in calls)}
    return {}


def _read(page: int, num_ranks: int, place: Mapping[str, int]) -> list[tuple[float, ...]]:
    """Return when each rank came to the last collectives that all have come to, the oldest first."""
    (count,) = struct.unpack("Q", os.pread(page, 8, 0))
    directory = os.pread(page, count * place["entry"], place["directory"])
    ids = [number for (number,) in struct.iter_unpack(f"Q{place['entry'] - 8}x", directory)]
    if _ALL_RANKS not in ids:
        return []
    window = place["windows"] + ids.index(_ALL_RANKS) * place["window"]
    # The last exchange of each slot, of which that of the verdict is the last: with even numbers, then with odd ones.
    words = struct.unpack(f"{2 * num_ranks + 2}Q", os.pread(page, 16 * num_ranks + 16, window + place["last"]))
    last = min(max(words[rank], words[rank + num_ranks + 1]) for rank in range(num_ranks))
    kept = place["kept"]
    data = os.pread(page, 8 * kept * num_ranks, window + place["arrivals"])
    times: Sequence[float] = memoryview(data).cast("d")
    # A rank may have come to the exchange after that, in the place of the oldest.
    return [
        tuple(times[rank * kept + number % kept] for rank in range(num_ranks))
        for number in range(max(1, last + 2 - kept), last + 1)
    ]
