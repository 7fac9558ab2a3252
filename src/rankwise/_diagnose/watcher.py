"""The process that watches the ranks of a host, and reports a hang.

It is a child of one rank, and ends with it, or when the rank closes the pipe. It looks at the ranks from outside, so
that it needs nothing of a rank that hangs, and costs the others no time. It does not import torch.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Final

from rankwise._diagnose.hang_report import QuietTimes, hang_report, waiting_ranks
from rankwise._diagnose.jobs import Job, find_job
from rankwise._diagnose.processes import DiagnosisError
from rankwise._diagnose.sampling import RankSample, sample_ranks
from rankwise._net.polling import wait_readable

_SAMPLES: Final = 4
_PAUSE_SECONDS: Final = 0.3
_LONGEST_INTERVAL: Final = 1.0
# If ranks are quiet but in no collective, their stacks are not read again before.
_RETRY_SECONDS: Final = 5.0


class Watcher:
    """The watch over the job of a rank."""

    def __init__(self, parent: int, seconds: float, folder: str) -> None:
        self._parent = parent
        self._seconds = seconds
        self._folder = folder
        self._quiet = QuietTimes()
        self._job: Job | None = None
        self._reports = 0
        self._not_before = 0.0

    def run(self) -> None:
        """Watch until the rank has closed the pipe, or has ended."""
        interval = min(_LONGEST_INTERVAL, self._seconds / 5)
        while os.getppid() == self._parent and not wait_readable({"rank": 0}, interval):
            self._look()

    def _look(self) -> None:
        if self._job is None or len(self._job.ranks) < self._job.world_size or not self._not_before:
            try:
                self._job = find_job(self._parent)
            except DiagnosisError:
                return
            self._not_before = self._not_before or time.monotonic()
        now = time.monotonic()
        quiet = self._quiet.update([rank.process.pid for rank in self._job.ranks], now)
        due = self._seconds * (1 + min(self._reports, 1))
        if max(quiet.values()) < self._seconds:
            self._reports = 0  # every rank has moved
        elif self._reports < 2 and max(quiet.values()) >= due and now >= self._not_before:  # noqa: PLR2004 - once, and again
            self._report(self._job, due)

    def _report(self, job: Job, due: float) -> None:
        """Report, if ranks are in a collective and stay there."""
        start = time.monotonic()
        self._not_before = start + min(_RETRY_SECONDS, self._seconds)
        history: list[list[RankSample]] = []
        for number in range(_SAMPLES):
            if number:
                time.sleep(_PAUSE_SECONDS)
            history.append(sample_ranks(job.ranks))
            now = time.monotonic()
            quiet = self._quiet.update([rank.process.pid for rank in job.ranks], now)
            if not waiting_ranks(history[-1], quiet, due):
                return
        self._reports += 1
        text = hang_report(job, history, quiet, now - start)
        if self._folder:
            text += f"\n{self._written(text, job)}"
        os.write(2, "".join(f"rankwise: {line}\n" for line in text.splitlines()).encode())

    def _written(self, text: str, job: Job) -> str:
        name = f"hang-{socket.gethostname()}-rank{job.ranks[0].rank}-{time.strftime('%Y%m%dT%H%M%S')}.txt"
        path = Path(self._folder) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        except OSError as error:
            return f"this report could not be written to {path}: {error.strerror}"
        return f"this report is in {path}"


def main() -> None:
    """Watch the job of the parent process, with the settings in the arguments."""
    Watcher(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]).run()
