"""A rank in a child process of what the engine has started for it: its end is seen, however it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rankwise._diagnose.jobs import OF_ONE_RANK
from rankwise._environment.facts import OVERRIDES
from rankwise._launch.engines.interface import RankJob, RankOutcome
from rankwise._launch.engines.no_terminal import BREAKPOINT_HOOK
from rankwise._launch.forkserver import worker
from rankwise._launch.forkserver.ipc import (
    Leaving,
    StartRequest,
    Target,
    TargetKind,
    WorkerResult,
    receive_message,
    serialize,
)
from rankwise._launch.grace_period import GRACE_SECONDS
from rankwise._launch.interpreter import interpreter_command
from rankwise._launch.reaper import LAUNCH_ID, kill_launch, set_parent_death_signal
from rankwise._launch.reported_steps import ReportedSteps
from rankwise._launch.spec import threads_of_each
from rankwise.errors import RankFailure


def main(search_path: Sequence[str]) -> None:
    """Run a rank in this new interpreter, which ends with its parent."""
    set_parent_death_signal()
    if os.getppid() == int(sys.argv.pop(1)):
        worker.main(search_path)


class RankChild:
    """A rank in a child process.

    Attributes:
        was_stopped: The engine has stopped the rank: set it before the rank gets a signal for that.
    """

    def __init__(self, job: RankJob, rank: int, environ: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            job: The job of the rank.
            rank: Its global rank.
            environ: Its environment, with the variables by which it finds its rank; defaults are added.
        """
        self.was_stopped = False
        self._job, self._rank, self._launch_id = job, rank, f"{OF_ONE_RANK}{uuid.uuid4().hex}"
        self._result: WorkerResult | None = None
        self._ended_ns = 0
        self._killer: threading.Timer | None = None
        self._reported = ReportedSteps(1)  # open until this process ends, soon after the rank
        self._crashes = tempfile.TemporaryFile()  # noqa: SIM115 - closed by wait()
        self._connection, theirs = socket.socketpair()
        command = [*interpreter_command("engines.rank_child"), str(os.getpid())]
        inherited = (theirs.fileno(), self._crashes.fileno())
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter
            [*command, *map(str, inherited)],
            env={**environ, LAUNCH_ID: self._launch_id},
            stdin=subprocess.DEVNULL,
            pass_fds=inherited,
        )
        theirs.close()
        self._reader = threading.Thread(target=self._receive, args=(self._request(environ),), daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """The process has not ended. May be asked in a signal handler, while another call waits."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, flags) is None
        except ChildProcessError:
            return False

    @property
    def returned(self) -> bool:
        """The target has ended without an error."""
        return self._result is not None and self._result.status == 0

    @property
    def stopped_by(self) -> int:
        """Why a `Stop` has ended the loop of the rank: a signal, or -1 for the limit of its job; 0 if none has."""
        return self._reported.stopped_by()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the rank, if it is running."""
        self._process.send_signal(signum)

    def wait(self) -> RankOutcome:
        """Wait until the rank has ended, kill what it has left, and return its outcome."""
        exitcode = self._process.wait()
        ended_ns = time.time_ns()
        self._connection.shutdown(socket.SHUT_RD)  # a process that the rank has forked may keep the other side open
        self._reader.join()
        self._connection.close()
        if self._killer is not None:
            self._killer.cancel()
            self._killer.join()
        kill_launch(self._launch_id, keeps_services=exitcode == 0)
        with self._crashes:
            self._crashes.seek(0)
            crash = self._crashes.read().decode(errors="replace") if exitcode < 0 else ""
        return self._outcome(exitcode, crash, self._ended_ns or ended_ns)

    def _request(self, environ: Mapping[str, str]) -> StartRequest:
        variables = {name: value for name, value in environ.items() if name not in OVERRIDES}
        variables |= {LAUNCH_ID: self._launch_id, **self._reported.variables(0)}
        variables.setdefault("PYTHONBREAKPOINT", BREAKPOINT_HOOK)
        variables.setdefault("OMP_NUM_THREADS", threads_of_each(self._job.nproc))
        job = self._job
        target = Target(kind=job.kind, argv=job.argv, call=job.call)
        return StartRequest(environ=variables, target=target, has_stdin=False)

    def _receive(self, request: StartRequest) -> None:
        try:
            self._connection.sendall(serialize(request))
            while isinstance(message := receive_message(self._connection), Leaving):
                sys.stderr.write(f"rankwise: {message.text}\n")
        except (OSError, EOFError):
            return  # it has ended without a result
        self._ended_ns = time.time_ns()
        self._result = message
        if self._result is not None and self._result.status:
            # A thread of the program may keep its process.
            self._killer = threading.Timer(GRACE_SECONDS, self._process.kill)
            self._killer.daemon = True
            self._killer.start()

    def _outcome(self, exitcode: int, crash: str, time_ns: int) -> RankOutcome:
        result, host = self._result, socket.gethostname()
        has_failed = exitcode != 0 or (self._job.kind is TargetKind.FUNCTION and (result is None or not result.value))
        if not has_failed:
            value = b"" if result is None else result.value
            return RankOutcome(rank=self._rank, value=value, time_ns=time_ns)
        if result is None or result.failure is None:
            stopped = self.was_stopped and exitcode < 0
            failure = RankFailure(
                rank=self._rank, host=host, exitcode=exitcode, traceback="" if stopped else crash, stopped=stopped
            )
            return RankOutcome(rank=self._rank, failure=failure, consequence=stopped, time_ns=time_ns)
        return RankOutcome(
            rank=self._rank,
            failure=replace(result.failure, rank=self._rank, exitcode=result.status),
            error=result.error,
            consequence=result.consequence,
            time_ns=time_ns,
        )
