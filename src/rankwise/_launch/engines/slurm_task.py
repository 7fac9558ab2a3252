"""What a task of srun runs, inside of submitit: one rank, in a child process."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rankwise._launch.engines import slurm_files
from rankwise._launch.engines.interface import RankJob
from rankwise._launch.engines.rank_child import RankChild
from rankwise._launch.report import describe_failures
from rankwise._launch.reported_steps import JOB_LIMIT

_POLL_SECONDS: Final = 0.2
# How long a task whose rank has ended after the signal waits for the end of the job.
_FOREVER: Final = 3600.0
# A rank that its `Stop` has ended for one of these reasons has not finished.
_NOT_FINISHED: Final = {signal.SIGUSR2, JOB_LIMIT}


class SlurmTask:
    """A rank of a job. It is pickled when the job is submitted, and called in each task.

    Attributes:
        token: The name of the outcomes of the job.
    """

    def __init__(self, job: RankJob, folder: Path, seconds_to_end: float, token: str = "") -> None:
        """Prepare.

        Args:
            job: The job of the rank.
            folder: The folder for its outcome.
            seconds_to_end: How long the rank may run after the signal, if the job is requeued.
            token: As the attribute; a new one by default.
        """
        self.job, self.folder, self.seconds_to_end = job, folder, seconds_to_end
        self.token = token or uuid.uuid4().hex
        self._child: RankChild | None = None
        self._got_signal = False

    def __getstate__(self) -> tuple[RankJob, Path, float, str]:
        return self.job, self.folder, self.seconds_to_end, self.token

    def __setstate__(self, state: tuple[RankJob, Path, float, str]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # the same class

    def __call__(self) -> None:
        """Run the rank, and record its outcome; a task whose rank has failed writes why, and exits with an error."""
        environ = dict(os.environ)
        requeue = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # as the rank inherits it
        signal.signal(signal.SIGTERM, self._stop)
        rank, attempt = int(environ["SLURM_PROCID"]), int(environ.get("SLURM_RESTART_COUNT", "0"))
        self._child = RankChild(self.job, rank, environ)
        self._handle_usr2(requeue)
        outcome = self._wait(self._child).on(environ.get("SLURMD_NODENAME", "?"))
        slurm_files.write_outcome(self.folder, self.token, attempt, outcome)
        if outcome.failure is not None:
            if not outcome.failure.stopped:
                sys.stderr.write(f"{describe_failures([outcome.failure], self.job.world_size)}\n")
                sys.stderr.flush()
            os._exit(abs(outcome.failure.exitcode) or 1)  # srun stops the other tasks

    def _wait(self, child: RankChild) -> Any:  # noqa: ANN401 - a RankOutcome
        return child.wait()

    def _handle_usr2(self, requeue: Any) -> None:  # noqa: ANN401 - a handler of signals, or a constant
        """Set what this process does on SIGUSR2, which the rank gets too: nothing, in place of submitit's `requeue`."""

    def _stop(self, signum: int, _: FrameType | None) -> None:
        if self._child is not None:
            self._child.was_stopped = True
            if self._child.is_running:
                self._child.send_signal(signum)


class RequeuedTask(SlurmTask):
    """A rank of a job that runs again after its time limit, or after the loss of a node."""

    def checkpoint(self) -> Any:  # noqa: ANN401 - a DelayedSubmission of submitit
        """Wait for the end of the rank after the signal; submitit then requeues the job, unless this returns None.

        It calls this in the task of rank zero alone.
        """
        import submitit  # noqa: PLC0415 - this runs inside of it

        child = self._child
        deadline = time.monotonic() + self.seconds_to_end
        while child is not None and child.is_running and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if child is not None and not child.is_running and child.returned and child.stopped_by not in _NOT_FINISHED:
            return None
        return submitit.helpers.DelayedSubmission(RequeuedTask(*self.__getstate__()))

    def _handle_usr2(self, requeue: Any) -> None:  # noqa: ANN401 - as above
        def handle(signum: int, frame: FrameType | None) -> None:
            self._got_signal = True
            requeue(signum, frame)

        signal.signal(signal.SIGUSR2, handle)

    def _wait(self, child: RankChild) -> Any:  # noqa: ANN401 - a RankOutcome
        try:
            outcome = child.wait()
        except RuntimeError:  # submitit's, in the handler: the job is not requeued
            return child.wait()
        has_failed = outcome.failure is not None and self._got_signal
        if (has_failed or child.stopped_by in _NOT_FINISHED) and not child.was_stopped:
            # An exit would stop the others, which may still save their states; and the signal may come after a rank has
            # stopped, shortly before the limit.
            time.sleep(_FOREVER)
        return outcome
