"""The process that watches the ranks of a host, and reports a hang.

It is a child of one rank, and ends with it, or when the rank closes the pipe. It looks at the ranks from outside, so
that it needs nothing of a rank that hangs, and costs the others no time. It does not import torch.

With several hosts, that of the first one asks the others for their findings, and prints one report. A watcher that it
does not answer reports alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from rankwise._diagnose.findings import Findings
from rankwise._diagnose.flight_record import GroupCalls, request_calls
from rankwise._diagnose.hang_report import QuietTimes, hang_report
from rankwise._diagnose.jobs import Job, find_job
from rankwise._diagnose.other_hosts import OtherHost, OtherHosts, RankGoneError
from rankwise._diagnose.polling_waits import PollingWaits
from rankwise._diagnose.processes import DiagnosisError
from rankwise._diagnose.report_file import write_report
from rankwise._diagnose.sampling import RankSample, sample_ranks
from rankwise._trace.page_arrivals import mean_lateness

_SAMPLES: Final = 4
_PAUSE_SECONDS: Final = 0.3
_LONGEST_INTERVAL: Final = 1.0
# If ranks are quiet but in no collective, their stacks are not read again before.
_RETRY_SECONDS: Final = 5.0
# How long other hosts may take for their findings, and the first host to ask for them.
_ANSWER_SECONDS: Final = 6.0
# How long ranks may take to answer which collectives they have called. Those that hold Python's lock do not.
_CALLS_SECONDS: Final = 1.5
_THREADS: Final = 8
# A report is printed when a wait is due, and once more.
_MOST_REPORTS: Final = 2


class Watcher:
    """The watch over the job of a rank.

    Attributes:
        hosts: The other hosts.
        is_first: This is the first host, which reports for all.
    """

    def __init__(self, hosts: OtherHosts, settings: dict[str, Any]) -> None:
        self.hosts = hosts
        self.is_first: bool = settings["is_first"]
        self._parent: int = settings["parent"]
        self._num_ranks: int = settings["ranks_here"]
        self._seconds: float = settings["seconds"]
        self._folder: str = settings["folder"]
        self._arrivals: dict[str, int] = settings["arrivals"]
        self._quiet = QuietTimes()
        self._polling = PollingWaits(self._seconds)
        self._job: Job | None = None
        self._reports = 0
        self._not_before = 0.0
        self._asked = 0.0
        self._reported = -self._seconds

    def run(self) -> None:
        """Watch until the rank has closed the pipe, or has ended."""
        interval = min(_LONGEST_INTERVAL, self._seconds / 5)
        try:
            while os.getppid() == self._parent:
                for _host, message in self.hosts.wait(interval):
                    self._handle(message)
                self._look()
        except RankGoneError:
            return

    def _handle(self, message: dict[str, Any]) -> None:
        """Answer a request of the watcher of another host."""
        if self.is_first and "due" in message:
            if time.monotonic() - self._reported > self._seconds / 2:  # else it has not known of that report
                self._report()
        elif "look" in message:
            self._asked = 0.0
            found = self._findings()
            self.hosts.tell({"findings": None if found is None else found.encode()})
        elif "reported" in message:
            self._reports += 1

    def _look(self) -> None:
        """Look at the ranks, and report if one waits for too long."""
        if self._find_job() is None:
            return
        now = time.monotonic()
        longest = max([*self._update_quiet(now).values(), *self._update_polling(now).values()])
        if longest < self._seconds:
            self._reports = 0  # every rank has moved
            self._asked = 0.0
        elif self._asked:
            if now - self._asked > _ANSWER_SECONDS:
                self._asked = 0.0
                self._report()
        elif self._reports < _MOST_REPORTS and longest >= self._due and now >= self._not_before:
            self._not_before = now + min(_RETRY_SECONDS, self._seconds)
            found = self._findings(1)
            if found is None or found.longest_wait() < self._due:
                return
            if not self.is_first and self.hosts.tell({"due": longest}):
                self._asked = now
            else:
                self._report()

    @property
    def _due(self) -> float:
        return self._seconds * (1 + min(self._reports, 1))

    def _find_job(self) -> Job | None:
        """Return the job; it is looked for until all of its ranks are found, and once after that."""
        if self._job is None or len(self._job.ranks) < self._num_ranks or not self._not_before:
            try:
                self._job = find_job(self._parent)
            except DiagnosisError:
                return None
            self._not_before = self._not_before or time.monotonic()
        return self._job

    def _update_quiet(self, now: float) -> dict[int, float]:
        """Return for how long each rank has not moved."""
        ranks = () if self._job is None else self._job.ranks
        quiet = self._quiet.update([rank.process.pid for rank in ranks], now)
        return {rank.rank: quiet[rank.process.pid] for rank in ranks}

    def _update_polling(self, now: float) -> dict[int, float]:
        """Return for how long each rank that does not sleep has been in the same collectives."""
        pids = {} if self._job is None else {rank.process.pid: rank.rank for rank in self._job.ranks}
        waits = self._polling.update(pids.keys() - self._quiet.asleep(now, _LONGEST_INTERVAL), now)
        return {pids[pid]: seconds for pid, seconds in waits.items()}

    def _findings(self, samples: int = _SAMPLES) -> Findings | None:
        job = self._find_job()
        if job is None:
            return None
        start = time.monotonic()
        history: list[list[RankSample]] = []
        for number in range(samples):
            if number:
                time.sleep(_PAUSE_SECONDS)
            self._update_quiet(time.monotonic())
            history.append(sample_ranks(job.ranks))
            self._quiet.skip([rank.process.pid for rank in job.ranks], time.monotonic())
        now = time.monotonic()
        return Findings(
            history=history,
            quiet=self._update_quiet(now),
            spent=now - start,
            polling=self._update_polling(now),
            calls=_calls_of(job) if samples == _SAMPLES else {},
            late=mean_lateness(job.pid, job.world_size, self._arrivals) if len(job.ranks) == job.world_size else {},
        )

    def _report(self) -> None:
        """Report, if ranks are in a collective and stay there."""
        if self.is_first:
            self.hosts.tell({"look": True})
        own = self._findings()
        if own is None or self._job is None:
            return
        answers = self._answers() if self.is_first else {}
        found = [own, *answers.values()]
        if max(each.longest_wait() for each in found) < self._seconds:
            return
        self._reports += 1
        self._reported = time.monotonic()
        if self.is_first:
            self.hosts.tell({"reported": True})
        silent = {str(host): host.why_silent for host in self.hosts.hosts if host not in answers}
        text = hang_report(self._job.world_size, found, silent)
        if self._folder:
            text += f"\n{write_report(self._folder, text, self._job.ranks[0].rank)}"
        os.write(2, "".join(f"rankwise: {line}\n" for line in text.splitlines()).encode())

    def _answers(self) -> dict[OtherHost, Findings]:
        """Return the findings of the other hosts."""
        found = {}
        for host, answer in self.hosts.collect("findings", _ANSWER_SECONDS).items():
            try:
                found[host] = replace(Findings.decode(answer), host=host.name)
            except ValueError as error:
                host.why_silent = str(error)
        return found


def _calls_of(job: Job) -> dict[int, Mapping[str, GroupCalls]]:
    """Return the calls of the ranks that answer."""
    with ThreadPoolExecutor(_THREADS) as pool:
        answers = pool.map(lambda rank: request_calls(rank.process.pid, _CALLS_SECONDS), job.ranks)
    return {rank.rank: calls for rank, calls in zip(job.ranks, answers, strict=True) if calls is not None}


def main() -> None:
    """Watch the job of the parent process, with the settings in the argument."""
    settings = json.loads(sys.argv[1])
    Watcher(OtherHosts(settings["hosts"], pipe=0), settings).run()
