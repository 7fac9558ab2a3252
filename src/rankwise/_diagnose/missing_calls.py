"""The first collective of a process group that not all ranks have reached, found in the calls of all. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankwise._diagnose.flight_record import GroupCalls
from rankwise._text import ranks_text


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingCall:
    """A collective of a process group that some of its ranks wait in.

    Attributes:
        group: The name of the group.
        number: The sequence number of the collective.
        operations: The ranks that have called it, by the operation.
        absent: The ranks that have not.
        unknown: Those that did not answer.
    """

    group: str
    number: int
    operations: Mapping[str, Sequence[int]]
    absent: Sequence[int]
    unknown: Sequence[int]

    def __str__(self) -> str:
        called = ", ".join(f"{name} of {ranks_text(ranks)}" for name, ranks in self.operations.items())
        parts = [f"{ranks_text(self.absent)} has not come"] if len(self.absent) == 1 else []
        parts += [f"{ranks_text(self.absent)} have not come"] if len(self.absent) > 1 else []
        parts += [f"{ranks_text(self.unknown)} did not answer"] if self.unknown else []
        parts += ["operations differ"] if len(self.operations) > 1 else []
        return f"collective {self.number} of process group {self.group}: {called}; {'; '.join(parts)}"


def missing_calls(calls: Mapping[int, Mapping[str, GroupCalls]], ranks: Sequence[int]) -> list[MissingCall]:
    """Return for each group the first collective that some ranks wait in, and not all of it have reached.

    Args:
        calls: The calls of each rank that has answered, in each group.
        ranks: All ranks that were asked, or would have been.
    """
    groups = dict.fromkeys(group for of_rank in calls.values() for group in of_rank)
    found = (_missing_call(group, calls, ranks) for group in groups)
    return [each for each in found if each is not None]


def _missing_call(
    group: str, calls: Mapping[int, Mapping[str, GroupCalls]], ranks: Sequence[int]
) -> MissingCall | None:
    known = {rank: of_rank[group] for rank, of_rank in calls.items() if group in of_rank}
    members = sorted({rank for each in known.values() for rank in each.ranks} or known)
    # A member that has answered, and has no record of the group, has called nothing in it.
    reached = {rank: known[rank].reached if rank in known else 0 for rank in members if rank in calls}
    unknown = [rank for rank in members if rank not in calls and rank in ranks]
    pending = [min(each.pending) for each in known.values() if each.pending]
    if not pending:
        return None
    number = min([*(last + 1 for last in reached.values()), *pending])
    absent = [rank for rank, last in reached.items() if last < number]
    operations: dict[str, list[int]] = {}
    for rank, each in sorted(known.items()):
        if each.reached >= number:
            operations.setdefault(each.operations.get(number, "an operation that is not recorded"), []).append(rank)
    if not operations or not (absent or unknown or len(operations) > 1):
        return None
    return MissingCall(group=group, number=number, operations=operations, absent=absent, unknown=unknown)


def absent_ranks(found: Sequence[MissingCall], calls: Mapping[int, Mapping[str, GroupCalls]]) -> set[int]:
    """Return the ranks that have not come to a collective, and are in no other one themselves."""
    absent = {rank for each in found for rank in each.absent}
    return {rank for rank in absent if not any(each.pending for each in calls[rank].values())}
