"""The ranks that run tests: a pool of processes kept from one test to the next, managed by pytest's process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import IO, Any

from rankwise._launch.forkserver.client import ForkServer
from rankwise._launch.forkserver.ipc import StartRequest, Target, TargetKind, WorkerResult, serialize
from rankwise._launch.rank_process import RankProcess, RankProcesses
from rankwise._launch.reaper import SECONDS_TO_END
from rankwise._launch.report import describe_end
from rankwise._launch.spec import common_environ
from rankwise._net.polling import EventLoop
from rankwise.errors import LaunchError, RankFailure
from rankwise.testing._plugin import timeouts
from rankwise.testing._plugin.messages import Aborted
from rankwise.testing._plugin.rank_session import STACKS


@dataclass(slots=True, kw_only=True)
class PooledRank(RankProcess):
    """A rank that runs tests.

    Attributes:
        output, errors: Files with the output since the last read; None if it goes to pytest's own output.
        crashes: A file with the stacks of its threads, after a crash or a request.
        messages: The messages that the rank has sent since the test began.
        is_over: Its function has ended, and its result has arrived.
    """

    output: IO[bytes] | None
    errors: IO[bytes] | None
    crashes: IO[bytes]
    messages: list[Any] = field(default_factory=list)
    is_over: bool = False

    def handle(self, message: Any) -> None:  # noqa: ANN401 - one of several classes
        """Keep a message until the test reads it."""
        self.messages.append(message)
        self.is_over = self.is_over or isinstance(message, WorkerResult)

    def problems(self, number: int) -> list[str]:
        """Return the errors that occurred when the rank ended."""
        texts = [message.text for message in self.messages if isinstance(message, Aborted)]
        results = [message for message in self.messages if isinstance(message, WorkerResult)]
        texts += [f"failed at its end\n{result.failure.traceback}" for result in results if result.failure]
        if not texts and not self.is_over:
            if self.is_running:
                texts = [f"did not tear down its fixtures of wider scope within {timeouts.TEARDOWN_SECONDS:g} s"]
            else:
                end = self.describe_end(number)
                texts = [f"{end} while it tore down its fixtures of wider scope\n{self.stack()}".rstrip()]
        return [f"rank {number} {text}" for text in texts]

    def describe_end(self, number: int, oom_text: str = "") -> str:
        """Return how the process has ended, as the rest of a sentence.

        Args:
            number: The rank.
            oom_text: The explanation of SIGKILL by the kernel's counters; "" if there is none.
        """
        return describe_end(RankFailure(rank=number, host=socket.gethostname(), exitcode=self.exitcode or 0), oom_text)

    def send(self, message: object) -> None:
        """Send a message, unless the rank has ended. Blocks until all of it is sent."""
        with contextlib.suppress(OSError):
            self.connection.setblocking(True)
            try:
                self.connection.sendall(serialize(message))
            finally:
                self.connection.setblocking(False)

    def new_output(self) -> tuple[str, str]:
        """Return its standard output and standard error since the last call."""
        return _read_and_clear(self.output), _read_and_clear(self.errors)

    def stack(self) -> str:
        """Return the stacks that it has written since the last call."""
        return _read_and_clear(self.crashes)


class WorkerPool:
    """The ranks that run tests, and the fork server that they come from.

    Attributes:
        ranks: The ranks, by number.
    """

    def __init__(self, *, captured: bool) -> None:
        """Start the fork server, which imports torch and pytest while the caller continues.

        Args:
            captured: The output of ranks is kept, to be shown with the test.

        Raises:
            LaunchError: Ranks cannot be started on this system.
        """
        self._captured = captured
        self._environ = common_environ(os.cpu_count() or 1, one_host=True)  # one thread each
        # First: where it raises, nothing is open yet.
        self._server = ForkServer(self._environ, prepare="rankwise.testing._plugin.rank_session:load_plugins")
        self._loop = EventLoop()
        self._processes = RankProcesses[PooledRank](self._server, self._loop)
        self.ranks = self._processes.ranks

    def start(
        self, numbers: Iterable[int], call: Callable[[int], tuple[bytes, dict[str, str]]], seconds: float
    ) -> None:
        """Start those ranks that do not run yet.

        Args:
            numbers: The ranks that a test needs.
            call: Returns the pickled function call for a rank, and the environment variables that it starts with.
            seconds: How long the start may take.

        Raises:
            LaunchError: This host has no resources for them, or they did not start in time.
        """
        missing = [number for number in numbers if number not in self.ranks]
        for number in missing:
            self._start(number, *call(number))
        started = [self.ranks[number] for number in missing]
        # `send` must not overtake the start request.
        if not self.wait(lambda: all(rank.pid and not rank.unsent for rank in started), _in(seconds)):
            raise LaunchError(f"ranks did not start within {seconds:g} s")

    def wait(self, condition: Callable[[], bool], deadline: Callable[[], float]) -> bool:
        """Process events until a condition holds; return False if it does not by the deadline.

        Args:
            condition: Evaluated after each event.
            deadline: Returns the time on the monotonic clock; an event may change it.

        Raises:
            LaunchError: The fork server has ended, and all ranks with it.
        """
        return self._loop.run_until(condition, deadline)

    def collect_stacks(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return the stacks of ranks; "" for a rank that has not written any."""
        ranks = {number: self.ranks[number] for number in numbers if self.ranks[number].is_running}
        stacks = dict.fromkeys(ranks, "")
        for number in ranks:
            self._processes.signal(number, STACKS)
        deadline = time.monotonic() + timeouts.STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(timeouts.STACK_POLL_SECONDS)  # regular files: nothing reports that they have grown
            written = {number: rank.stack() for number, rank in ranks.items()}
            stacks = {number: stacks[number] + written[number] for number in ranks}
            if all(stacks.values()) and not any(written.values()):
                break
        return stacks

    def retire(self) -> list[str]:
        """End all ranks and their descendants: gracefully if they can, else by SIGKILL.

        Returns:
            The errors in the teardown of their fixtures of wider scope.
        """
        alive = {number: rank for number, rank in self.ranks.items() if rank.is_running}
        for rank in alive.values():
            rank.messages.clear()
            rank.send(None)
        # The result is a rank's last message. Threads may keep its process alive after that, and are not waited for.
        self.wait(
            lambda: all(rank.is_over or not rank.is_running for rank in alive.values()), _in(timeouts.TEARDOWN_SECONDS)
        )
        problems = [text for number, rank in alive.items() for text in rank.problems(number)]
        if not self._have_ended(timeouts.PROCESS_END_SECONDS):
            self.kill()
        self._processes.sweep()
        self._clear()
        return problems

    def kill(self, numbers: Iterable[int] | None = None) -> None:
        """Kill some ranks, by default all."""
        for number in self.ranks if numbers is None else numbers:
            if self.ranks[number].is_running:
                self._processes.signal(number, signal.SIGKILL)
        self._have_ended(SECONDS_TO_END, numbers)

    def close(self, *, gently: bool = True) -> list[str]:
        """End everything, the fork server included, and return the errors on ranks.

        Args:
            gently: Let ranks tear down their fixtures.
        """
        problems: list[str] = []
        try:
            if gently:
                with contextlib.suppress(LaunchError):
                    problems = self.retire()
        finally:
            self._processes.close()
            self._clear()
            self._loop.close()
        return problems

    def _clear(self) -> None:
        for rank in self.ranks.values():
            for file in (rank.output, rank.errors, rank.crashes):
                if file is not None:
                    file.close()
        self._processes.clear()

    def _have_ended(self, seconds: float, numbers: Iterable[int] | None = None) -> bool:
        ranks = [self.ranks[number] for number in (self.ranks if numbers is None else numbers)]
        return self.wait(lambda: not any(rank.is_running for rank in ranks), _in(seconds))

    def _start(self, number: int, call: bytes, variables: dict[str, str]) -> None:
        rank = PooledRank(
            output=_unnamed_file() if self._captured else None,
            errors=_unnamed_file() if self._captured else None,
            crashes=_unnamed_file(),
        )
        target = Target(kind=TargetKind.FUNCTION_WITH_CONNECTION, call=call)
        request = StartRequest(environ={**self._environ, **variables}, target=target)
        stdout = 1 if rank.output is None else rank.output.fileno()
        stderr = 2 if rank.errors is None else rank.errors.fileno()
        self._processes.start(number, rank, request, [stdout, stderr, rank.crashes.fileno()])


def _in(seconds: float) -> Callable[[], float]:
    """Return a deadline that many seconds from now."""
    deadline = time.monotonic() + seconds
    return lambda: deadline


def _unnamed_file() -> IO[bytes]:
    """Return a file without a name, in append mode: the rank writes to it while this process clears it."""
    return tempfile.TemporaryFile("a+b", buffering=0)


def _read_and_clear(file: IO[bytes] | None) -> str:
    if file is None:
        return ""
    file.seek(0)
    data = file.read()
    if data:
        file.truncate(0)
    return data.decode(errors="replace")
