"""The report of a hang: who waits in a collective, for how long, and which rank they wait for."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rankwise._diagnose.folding import by_location, details
from rankwise._diagnose.jobs import Job
from rankwise._diagnose.processes import main_thread_times
from rankwise._diagnose.sampling import RankSample
from rankwise._diagnose.watching import suspects, waits
from rankwise._text import ranks_text

# A main thread that runs for less than this part of the time does not move. One that waits in a collective of rankwise
# wakes up twice a second.
_IDLE: Final = 0.01
# The stacks of more ranks are not printed.
_MOST_RANKS: Final = 64


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


def waiting_ranks(samples: Sequence[RankSample], quiet: Mapping[int, float], seconds: float) -> list[RankSample]:
    """Return the ranks that have been in a collective for at least that many seconds."""
    return [sample for sample in samples if quiet.get(sample.process.pid, 0.0) >= seconds and waits(sample.process)]


def hang_report(job: Job, history: Sequence[Sequence[RankSample]], quiet: Mapping[int, float], spent: float) -> str:
    """Return the report.

    Args:
        job: The job.
        history: Some samples of its ranks here, the last one of now.
        quiet: For how long each process has not moved.
        spent: The seconds between the first and the last sample.
    """
    last = history[-1]
    missing = suspects(history, spent)
    named = {suspect.rank for suspect in missing}
    waiting = [sample for sample in last if waits(sample.process) and sample.rank not in named]
    here = "" if len(job.ranks) == job.world_size else f" ({len(job.ranks)} of {job.world_size} ranks are here)"
    lines = [f"hang report of {socket.gethostname()}{here}:"]
    for location, ranks in by_location(waiting).items():
        seconds = max(quiet.get(sample.process.pid, 0.0) for sample in waiting if sample.rank in ranks)
        lines.append(f"  {ranks_text(ranks)}: waiting for {seconds:.0f} s in {location}")
    lines += [f"  missing: rank {suspect.rank}, {suspect.how}: {suspect.location}" for suspect in missing] or [
        _nobody(job, history[-1])
    ]
    if len(last) <= _MOST_RANKS:
        lines.append(details(last))
    return "\n".join(lines)


def _nobody(job: Job, last: Sequence[RankSample]) -> str:
    absent = sorted(set(range(job.world_size)) - {sample.rank for sample in last})
    if len(by_location(last)) > 1:
        return "  missing: not known; the ranks are in different calls"
    if absent:
        return f"  missing: none of the ranks here; look at {ranks_text(absent)}: on other hosts, or ended"
    return "  missing: none; all ranks are in the same call"
