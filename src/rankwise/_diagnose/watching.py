"""Several samples of a job, and the verdict on them: which rank the others wait for, and if it is stuck or slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from rankwise._diagnose.jobs import Job
from rankwise._diagnose.processes import allowed_cores
from rankwise._diagnose.sampling import STATES, ProcessSample, RankSample
from rankwise._diagnose.stack import StackFrame
from rankwise._text import ranks_text

# A rank that is apart from the others in that part of the samples is named.
_OFTEN: Final = 0.5
# A main thread that runs for less than this part of the time waits. A rank that waits in a collective wakes up twice a
# second, and writing its stack takes time too.
_IDLE: Final = 0.003
_SECONDS_OF_SAMPLE: Final = 0.001
# With more, in one line, it computes. If it waits for a core that long, it has to share the core.
_BUSY: Final = 0.5
_SHARED: Final = 0.25
_ALIVE: Final = "RSI"
_ENDED: Final = "ZX"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that the others wait for.

    Attributes:
        rank: The rank.
        apart: The number of samples in which it was apart from the others.
        samples: The number of all samples.
        how: Whether it has moved in between.
        location: Where it was in most of the samples in which it was apart; where it has stopped, if it has.
    """

    rank: int
    apart: int
    samples: int
    how: str
    location: str

    def __str__(self) -> str:
        often = f"apart from the others in {self.apart} of {self.samples} samples"
        return f"rank {self.rank}: {often}, {self.how}, {self.location}"


def apart(samples: Sequence[RankSample], polling: Collection[int] = ()) -> set[int]:
    """Return the ranks of a sample for which the others wait: none, if all are at one place.

    A rank that is stopped, or has ended, is one. So are those that are in no collective while others are in one; and
    where all are in collectives, those that are in another one than most.

    Args:
        samples: The sample.
        polling: The ranks that are known to wait in a collective, whatever their stacks.
    """
    halted = {sample.rank for sample in samples if sample.process.state not in _ALIVE}
    rest = [sample for sample in samples if sample.rank not in halted]
    waiting = [sample for sample in rest if sample.rank in polling or waits(sample.process)]
    outside = {sample.rank for sample in rest} - {sample.rank for sample in waiting}
    if halted or (outside and waiting):
        return halted | (outside if waiting else set())
    if outside:
        return set()
    return _minority({sample.rank: sample.process.location for sample in rest})


def waits(sample: ProcessSample) -> bool:
    """Return whether a process is in a collective, waits for an accelerator, or sleeps in a backward pass of DDP."""
    return sample.stack is not None and (
        sample.stack.in_collective or sample.waits_for_device or (sample.stack.in_backward and sample.state == "S")
    )


def _minority(locations: dict[int, str]) -> set[int]:
    counts = Counter(locations.values()).most_common()
    if len(counts) < 2 or counts[0][1] == counts[1][1]:
        return set()
    return {rank for rank, location in locations.items() if location != counts[0][0]}


def suspects(history: Sequence[Sequence[RankSample]], seconds: float, polling: Collection[int] = ()) -> list[Suspect]:
    """Return the ranks that were apart in at least half of the samples, the most frequent first.

    Args:
        history: The samples, in order.
        seconds: The time between the first and the last one.
        polling: The ranks that are known to wait in a collective, whatever their stacks.
    """
    apart_in: dict[int, list[Sequence[RankSample]]] = {}
    for samples in history:
        for rank in apart(samples, polling):
            apart_in.setdefault(rank, []).append(samples)
    return [
        suspect(rank, history, seconds, found)
        for rank, found in sorted(apart_in.items(), key=lambda item: -len(item[1]))
        if len(found) >= _OFTEN * len(history)
    ]


def suspect(
    rank: int, history: Sequence[Sequence[RankSample]], seconds: float, apart_in: Sequence[Sequence[RankSample]]
) -> Suspect:
    """Return a rank that was apart from the others in some samples, with what its own samples show."""
    own = _samples_of(rank, history)
    location = _usual_location(_samples_of(rank, apart_in))
    return Suspect(rank, len(apart_in), len(history), _movement(own, seconds), location)


def _usual_location(samples: Sequence[ProcessSample]) -> str:
    """Return where a process was most often, the latest of equals; where it has stopped, if it has."""
    if samples[-1].state in STATES:
        return samples[-1].location
    return Counter(sample.location for sample in reversed(samples)).most_common(1)[0][0]


def _movement(samples: Sequence[ProcessSample], seconds: float) -> str:
    """Return whether a process has moved, as text."""
    if samples[-1].state in STATES or not _moves(samples, seconds):
        return "not moving"
    if len(_stacks(samples)) == 1 and samples[-1].run_seconds - samples[0].run_seconds > _BUSY * seconds:
        return "computing in one line"
    return "moving (slow, not stuck)"


def _moves(samples: Sequence[ProcessSample], seconds: float) -> bool:
    """Return whether a process has moved: its stack has changed, or its main thread has run."""
    ran = samples[-1].run_seconds - samples[0].run_seconds
    return len(_stacks(samples)) > 1 or ran > _IDLE * seconds + _SECONDS_OF_SAMPLE * len(samples)


def _stacks(samples: Sequence[ProcessSample]) -> set[tuple[StackFrame, ...] | None]:
    return {None if sample.stack is None else tuple(sample.stack.frames) for sample in samples}


def verdict(job: Job, history: Sequence[Sequence[RankSample]], seconds: float) -> str:
    """Return the verdict on several samples, with a line for each rank that the others wait for."""
    lines = [str(suspect) for suspect in suspects(history, seconds)]
    if job.absent and job.one_host:
        lines.insert(0, f"{ranks_text(job.absent)}: no process: ended, or not started")
    lines = lines or [_common_place(history, seconds)]
    if job.absent and not job.one_host:
        lines.append(f"{ranks_text(job.absent)}: not on this host: on another one, or ended")
    return "\n".join([*lines, *_shared_cores(history, seconds)])


def _common_place(history: Sequence[Sequence[RankSample]], seconds: float) -> str:
    """Return where all ranks are, if none is apart from the others."""
    last = history[-1]
    if all(rank.process.state in _ENDED for rank in last):
        return "all ranks that were here have ended"
    moving = [rank.rank for rank in last if _moves(_samples_of(rank.rank, history), seconds)]
    if moving:
        return f"no rank is apart from the others: {ranks_text(moving)} moved"
    places: dict[str, list[int]] = {}
    for rank in last:
        places.setdefault(rank.process.location, []).append(rank.rank)
    if len(places) == 1:
        return f"no rank moves, and all ranks here are in {last[0].process.location}"
    texts = [f"{ranks_text(ranks)} in {place}" for place, ranks in places.items()]
    return f"no rank moves, and the ranks are in different calls: {'; '.join(texts)}"


def _shared_cores(history: Sequence[Sequence[RankSample]], seconds: float) -> list[str]:
    """Return a line for each set of cores that several ranks have to share, and often wait for."""
    waiting: dict[str, list[int]] = {}
    for rank in history[-1]:
        own = _samples_of(rank.rank, history)
        if own[-1].delay_seconds - own[0].delay_seconds > _SHARED * seconds:
            waiting.setdefault(allowed_cores(own[-1].pid), []).append(rank.rank)
    return [
        f"{ranks_text(ranks)} waited for a core in more than {_SHARED:.0%} of the time: they share cores {cores}"
        for cores, ranks in waiting.items()
        if len(ranks) > 1
    ]


def _samples_of(rank: int, history: Sequence[Sequence[RankSample]]) -> list[ProcessSample]:
    return [sample.process for samples in history for sample in samples if sample.rank == rank]
