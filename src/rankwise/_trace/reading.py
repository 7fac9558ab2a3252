"""The calls of all ranks of a run, with their clocks aligned: who came last, and what that has cost. No output."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Final

from rankwise._trace.recording import SUFFIX, RankRecord, read_record
from rankwise.errors import InvalidArgumentError

# The clocks of two hosts are compared anew after so many calls: their rates may differ by some millionths.
_CALLS_OF_CLOCK: Final = 16
# More take too much memory: with more than 16 ranks, only the last calls are read.
_MOST_CALLS: Final = 1 << 20
# The group of all ranks.
_WORLD: Final = 0
_MOST_PROBLEMS: Final = 10
Key = tuple[int, int]


@dataclass(slots=True)
class Call:
    """A call of a group.

    Attributes:
        text: The operation and its call site.
        came: When each rank came, in seconds on the clock of the first host.
        ended: When it ended, for each rank for which that is known.
    """

    text: str
    came: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of all other ranks for the last one: the call, the rank, and for how many seconds."""

    call: Call
    rank: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """The traces of one run.

    Attributes:
        folder: Where they are.
        records: The records of the ranks whose files could be read, in their order.
        problems: What could not be read.
        calls: The calls by group and number, in the order of the first rank that came.
    """

    folder: Path
    records: Sequence[RankRecord]
    problems: Sequence[str]
    calls: Mapping[Key, Call]

    @cached_property
    def members(self) -> dict[int, set[int]]:
        """The ranks of each group, as far as they have called something."""
        members: dict[int, set[int]] = {}
        for (group, _), call in self.calls.items():
            members.setdefault(group, set()).update(call.came)
        return members

    @cached_property
    def complete(self) -> list[Call]:
        """The calls that all ranks of a group came to; without the first one, to which they came from their starts."""
        found = [call for (group, _), call in self.calls.items() if len(call.came) == len(self.members[group]) > 1]
        return found[1:]

    @cached_property
    def waits(self) -> list[Wait]:
        """The waits in these calls."""
        found = []
        for call in self.complete:
            (_, before), (rank, last) = sorted(call.came.items(), key=lambda item: item[1])[-2:]
            found.append(Wait(call, rank, last - before))
        return found

    @cached_property
    def seconds(self) -> float:
        """The time from the first of these calls to the last one."""
        times = [max(call.came.values()) for call in self.complete]
        return max(times) - min(times) if times else 0.0

    def missing(self) -> dict[str, tuple[list[int], list[int]]]:
        """Return the calls in which the records of ranks end, and to which others have not come: those, and these."""
        found = {}
        for record in self.records:
            key = next(reversed(record.calls), None)
            if key is None or record.calls[key].ended:
                continue
            members = set(range(record.world_size)) if key[0] == _WORLD else self.members[key[0]]
            call = self.calls[key]
            if members - call.came.keys():
                found[f"{call.text}, call {key[1]}"] = sorted(call.came), sorted(members - call.came.keys())
        return found


def read_run(folder: Path) -> Run:
    """Read the traces of a run: those in a folder, or in the newest folder in it that has some.

    Raises:
        InvalidArgumentError: There are none.
    """
    runs = [one for one in (folder, *sorted(folder.glob("*/"), reverse=True)) if any(one.glob(f"*{SUFFIX}"))]
    if not runs:
        raise InvalidArgumentError(f"{folder} has no traces; set RANKWISE_TRACE={folder} for all ranks, and run again")
    records, problems = [], []
    files = sorted(runs[0].glob(f"*{SUFFIX}"))
    for file in files:
        try:
            records.append(read_record(file, most=_MOST_CALLS // len(files)))
        except (OSError, ValueError) as error:
            problems.append(f"{file} cannot be read: {error}")
    missing = {rank for record in records for rank in range(record.world_size)} - {record.rank for record in records}
    problems += [f"there is no trace of rank {rank} in {runs[0]}" for rank in sorted(missing)[:_MOST_PROBLEMS]]
    return Run(folder=runs[0], records=records, problems=problems, calls=_calls_of(records))


def _calls_of(records: Sequence[RankRecord]) -> dict[Key, Call]:
    """Return the calls of all ranks, on the clock of the first host."""
    calls: dict[Key, Call] = {}
    hosts: dict[str, list[RankRecord]] = {}
    for record in records:
        hosts.setdefault(record.host_id, []).append(record)
    first = next(iter(hosts.values()), [])
    for here in hosts.values():
        since, offsets = _offsets(first, here)
        for record in here:
            for key, one in record.calls.items():
                offset = offsets[max(0, bisect_right(since, one.came) - 1)]
                call = calls.setdefault(key, Call(one.text))
                call.came[record.rank] = one.came + offset
                if one.ended:
                    call.ended[record.rank] = one.ended + offset
    return dict(sorted(calls.items(), key=lambda item: min(item[1].came.values())))


# The clocks of hosts differ by any number of seconds. A call ends on all hosts when the verdict arrives there: at the
# same time, but for the time of a message. And no rank leaves a call before all have come: so it ends on one host after
# the arrivals of the other host's ranks, and the other way round, which are bounds for the difference of the clocks.
def _offsets(first: Sequence[RankRecord], here: Sequence[RankRecord]) -> tuple[list[float], list[float]]:
    """Return what to add to the clock of a host for that of the first one, and since when, on the clock of the host."""
    if here == first:
        return [0.0], [0.0]
    ends = [(_ends(first, key), _ends(here, key)) for key in here[0].calls]
    shared = [(theirs, ours) for theirs, ours in ends if theirs is not None and ours is not None]
    since, offsets = [], []
    for start in range(0, len(shared), _CALLS_OF_CLOCK):
        block = shared[start : start + _CALLS_OF_CLOCK]
        most = min(theirs[1] - ours[0] for theirs, ours in block)
        least = max(theirs[0] - ours[1] for theirs, ours in block)
        usual = median(theirs[1] - ours[1] for theirs, ours in block)
        since.append(block[0][1][0])
        offsets.append(min(max(usual, least), most))
    return (since, offsets) if since else ([0.0], [here[0].clock - first[0].clock])


def _ends(records: Sequence[RankRecord], key: Key) -> tuple[float, float] | None:
    """Return when the last rank came to a call, and when it ended for the first one; None if one has not been there."""
    calls = [record.calls.get(key) for record in records]
    known = [call for call in calls if call is not None and call.ended]
    if not known:
        return None
    return max(call.came for call in known), min(call.ended for call in known)
