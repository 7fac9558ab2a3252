"""The report of a hang: who waits in a collective, for how long, and which rank they wait for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rankwise._diagnose.findings import Findings
from rankwise._diagnose.flight_record import GroupCalls
from rankwise._diagnose.folding import by_location, details
from rankwise._diagnose.processes import main_thread_times
from rankwise._diagnose.sampling import RankSample
from rankwise._diagnose.watching import Suspect, suspect, suspects, waits
from rankwise._text import ranks_on_hosts_text, ranks_text
from rankwise._trace.lateness import milliseconds

# A main thread that runs for less than this part of the time does not move. One that waits in a collective of rankwise
# wakes up twice a second.
_IDLE: Final = 0.01
# The stacks of more ranks are not printed.
_MOST_RANKS: Final = 64
# Who came less late to the collectives before is not named.
_LATE_SECONDS: Final = 0.001


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


@dataclass(slots=True)
class QuietTimes:
    """For how long each process has not moved: its main thread has hardly run."""

    _last: dict[int, tuple[float, float]] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)

    def update(self, pids: Sequence[int], now: float) -> Mapping[int, float]:
        """Look at processes again, and return the seconds for which each has been quiet."""
        for pid in self._last.keys() - set(pids):
            del self._last[pid], self._since[pid]
        for pid in pids:
            ran, _delay = main_thread_times(pid)
            before, then = self._last.get(pid, (ran - 1.0, now))
            if ran - before > _IDLE * (now - then):
                self._since[pid] = now
            self._last[pid] = ran, now
        return {pid: now - self._since[pid] for pid in pids}

    def skip(self, pids: Sequence[int], now: float) -> None:
        """Leave out what processes have run since the last look: for this one, as to write their stacks on request."""
        for pid in self._last.keys() & set(pids):
            self._last[pid] = main_thread_times(pid)[0], now

    def asleep(self, now: float, seconds: float) -> set[int]:
        """Return the processes that have not moved for so many seconds."""
        return {pid for pid, since in self._since.items() if now - since >= seconds}


# A hang has one cause, on a rank that does not look special: it works, sleeps, or waits for something else, while all
# others wait in a collective. Two witnesses say who it is, and neither is enough alone.
#
# The stacks, sampled several times: ranks whose stacks do not change, in the same line, wait; the one elsewhere is
# missing. But a rank that computes has changing stacks, and one in a long step of its own looks like those that wait.
# The records of torch's collectives: which call of a group each rank has begun, so who has not come. But they do not
# know rankwise's own, and a rank may have died before it wrote one.
#
# So the stacks are asked first, over the whole time, and the records where they name nobody (`_missing`). Ranks that
# poll, as those that wait on the CPU for a device, count as waiting. Hosts that have not answered are named with the
# reason: the missing rank may be theirs. Where nobody can be named, the report says so, and shows all stacks.
def hang_report(world_size: int, found: Sequence[Findings], silent: Mapping[str, str]) -> str:
    """Return the report.

    Args:
        world_size: The number of ranks.
        found: The findings of each host, those of this one first.
        silent: Why other hosts have not answered, by their names and ranks.
    """
    history = _merged(found)
    last = history[-1]
    hosts = {rank: each.host for each in found for rank in each.ranks} if len(found) > 1 or silent else {}
    calls = {rank: each.calls[rank] for each in found for rank in each.calls}
    uncalled = missing_calls(calls, [sample.rank for sample in last])
    missing = _missing(history, found, absent_ranks(uncalled, calls))
    named = {suspect.rank for suspect in missing}
    polling = {rank for each in found for rank in each.polling}
    waiting = [
        sample for sample in last if (sample.rank in polling or waits(sample.process)) and sample.rank not in named
    ]
    lines = [_heading(world_size, found, len(last))]
    for location, ranks in by_location(waiting).items():
        seconds = max(each.wait_of(rank) for each in found for rank in ranks)
        lines.append(f"  {ranks_on_hosts_text(ranks, hosts)}: waiting for {seconds:.0f} s in {location}")
    lines += [
        f"  missing: {ranks_on_hosts_text([each.rank], hosts)}, {each.how}: {each.location}" for each in missing
    ] or [_nobody(world_size, last)]
    lines += [
        f"  late before: {ranks_on_hosts_text([rank], hosts)}, {milliseconds(seconds)} on average in its last calls"
        for each in found
        for rank, seconds in each.late.items()
        if seconds == max(each.late.values()) >= _LATE_SECONDS
    ]
    lines += [f"  {each}" for each in uncalled]
    lines += [f"  no answer from {host}: {why}" for host, why in silent.items()]
    if len(last) <= _MOST_RANKS:
        lines.append(details(last, hosts))
    return "\n".join(lines)


def _missing(
    history: Sequence[Sequence[RankSample]], found: Sequence[Findings], absent: Collection[int]
) -> list[Suspect]:
    """Return the ranks that the others wait for: by their stacks, else those that have not come to a collective."""
    spent = max(each.spent for each in found)
    polling = {rank for each in found for rank in each.polling}
    ranks = {sample.rank for sample in history[-1]}
    return suspects(history, spent, polling) or [
        suspect(rank, history, spent, history) for rank in sorted(ranks & set(absent))
    ]


def _heading(world_size: int, found: Sequence[Findings], num_ranks: int) -> str:
    here = "" if num_ranks == world_size else f" ({num_ranks} of {world_size} ranks)"
    return f"hang report of {', '.join(each.host for each in found)}{here}:"


def _merged(found: Sequence[Findings]) -> list[list[RankSample]]:
    """Return the samples of all hosts, as if they were of one; of a rank that several hosts have seen, the first."""
    merged = []
    for number in range(min(len(each.history) for each in found)):
        of_rank: dict[int, RankSample] = {}
        for each in found:
            for sample in each.history[number]:
                of_rank.setdefault(sample.rank, sample)
        merged.append([of_rank[rank] for rank in sorted(of_rank)])
    return merged


def _nobody(world_size: int, last: Sequence[RankSample]) -> str:
    absent = sorted(set(range(world_size)) - {sample.rank for sample in last})
    if len(by_location(last)) > 1:
        return "  missing: not known; the ranks are in different calls"
    if absent:
        return f"  missing: none of these ranks; look at {ranks_text(absent)}: on other hosts, or ended"
    return "  missing: none; all ranks are in the same call"
