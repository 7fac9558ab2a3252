"""Ranks that are kept from one test to the next, as pytest's process sees them: started, told, messages, ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import IO, Any, Final

from rankwise._launch.forkserver.client import ForkServer, receive_available
from rankwise._launch.forkserver.ipc import Event, StartRequest, TargetKind, WorkerResult, pop_messages, serialize
from rankwise._launch.reaper import MARK, SECONDS_TO_END
from rankwise._launch.report import describe_end
from rankwise._launch.spec import common_environ
from rankwise.errors import LaunchError, RankFailure
from rankwise.testing._plugin.messages import Aborted
from rankwise.testing._plugin.rank_session import STACKS

# How long ranks may take to put away their fixtures of wider scope and write their coverage, and then to end.
_LEAVE_SECONDS: Final = 60.0
_END_SECONDS: Final = 5.0
# How long a stack takes to write; ranks that are alive all can.
_STACK_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.02


@dataclass(slots=True, kw_only=True)
class PooledRank:
    """A rank that runs tests.

    Attributes:
        connection: To it.
        output, errors: What it prints, since that was last read; None if it goes where pytest's own goes.
        crashes: Its stacks, when it crashed or was asked for them.
        inbox: What it has told, and was not read yet.
        messages: What it has told in the test that runs.
        pid: Its process; 0 until it runs.
        exitcode: How that ended, once it has.
        is_over: What it ran has ended, and it has told how.
    """

    connection: socket.socket
    output: IO[bytes] | None
    errors: IO[bytes] | None
    crashes: IO[bytes]
    inbox: bytearray = field(default_factory=bytearray)
    messages: list[Any] = field(default_factory=list)
    pid: int = 0
    exitcode: int | None = None
    is_over: bool = False

    @property
    def is_running(self) -> bool:
        """Its process has not ended."""
        return self.exitcode is None

    def problems(self, number: int) -> list[str]:
        """Return what went wrong when it ended."""
        texts = [message.text for message in self.messages if isinstance(message, Aborted)]
        outcomes = [message for message in self.messages if isinstance(message, WorkerResult)]
        texts += [f"failed at its end\n{outcome.traceback}" for outcome in outcomes if outcome.traceback]
        if not texts and not self.is_over:
            if self.is_running:
                texts = [f"did not put away its fixtures of wider scope within {_LEAVE_SECONDS:g} s"]
            else:
                end = self.describe_end(number)
                texts = [f"{end} while it put away its fixtures of wider scope\n{self.stack()}".rstrip()]
        return [f"rank {number} {text}" for text in texts]

    def describe_end(self, number: int, kernel: str = "") -> str:
        """Return how its process has ended, as the rest of a sentence; `kernel` is what the kernel says to that."""
        return describe_end(RankFailure(rank=number, host=socket.gethostname(), exitcode=self.exitcode or 0), kernel)

    def send(self, message: object) -> None:
        """Tell it something, if it is still there."""
        with contextlib.suppress(OSError):
            self.connection.sendall(serialize(message))

    def new_output(self) -> tuple[str, str]:
        """Return what it has printed since this was last asked."""
        return _rest(self.output), _rest(self.errors)

    def stack(self) -> str:
        """Return the stacks that it has written since this was last asked."""
        return _rest(self.crashes)


class WorkerPool:
    """The ranks, and the server that they are forked from."""

    def __init__(self, *, captured: bool) -> None:
        """Start the server, which loads torch and pytest while the caller goes on.

        Args:
            captured: What ranks print is kept, to be shown with the test.
        """
        self.ranks: dict[int, PooledRank] = {}
        self._captured = captured
        self._selector = selectors.DefaultSelector()
        self._swept = False
        self._environ = common_environ(os.cpu_count() or 1, one_host=True)  # one thread each
        self._server = ForkServer(self._environ, prepare="rankwise.testing._plugin.rank_session:load_plugins")
        self._selector.register(self._server.control, selectors.EVENT_READ, self._hear_server)

    def start(
        self, numbers: Iterable[int], call: Callable[[int], tuple[bytes, dict[str, str]]], seconds: float
    ) -> None:
        """Start those ranks that are not there yet.

        Args:
            numbers: The ranks that are wanted.
            call: Returns what one is to run, pickled, and the variables that it has from the beginning.
            seconds: How long that may take.

        Raises:
            LaunchError: This host has no room for them, or they did not start in time.
        """
        missing = [number for number in numbers if number not in self.ranks]
        for number in missing:
            self._start(number, *call(number))
        started = [self.ranks[number] for number in missing]
        if not self.wait(lambda: all(rank.pid for rank in started), _in(seconds)):
            raise LaunchError(f"ranks did not start within {seconds:g} s")

    def wait(self, until: Callable[[], bool], deadline: Callable[[], float]) -> bool:
        """Take note of what happens until something is so; False if it is not so in time.

        Args:
            until: Whether it is so; asked after each thing that happens.
            deadline: Until when, on the monotonic clock; what happens may change it.

        Raises:
            LaunchError: The server is gone, and all ranks with it.
        """
        while not until():
            left = deadline() - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self._selector.select(left):
                key.data()
        return True

    def collect_stacks(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return the stacks of ranks; "" for one that did not write any."""
        ranks = {number: self.ranks[number] for number in numbers if self.ranks[number].is_running}
        stacks = dict.fromkeys(ranks, "")
        for number in ranks:
            self._server.signal(number, STACKS)
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            written = {number: rank.stack() for number, rank in ranks.items()}
            stacks = {number: stacks[number] + written[number] for number in ranks}
            if all(stacks.values()) and not any(written.values()):
                break
        return stacks

    def retire(self) -> list[str]:
        """End all ranks, and what they have started: those that can by themselves, the others by SIGKILL.

        Returns:
            What went wrong when they put away their fixtures of wider scope.
        """
        alive = {number: rank for number, rank in self.ranks.items() if rank.is_running}
        for rank in alive.values():
            rank.messages.clear()
            rank.send(None)
        # What they run tells its outcome at last; threads may keep the process for longer, and for nothing.
        self.wait(lambda: all(rank.is_over or not rank.is_running for rank in alive.values()), _in(_LEAVE_SECONDS))
        problems = [text for number, rank in alive.items() for text in rank.problems(number)]
        if not self._have_ended(_END_SECONDS):
            self.kill()
        self._swept = False
        self._server.sweep()
        self.wait(lambda: self._swept, _in(SECONDS_TO_END))
        self._let_go()
        return problems

    def kill(self, numbers: Iterable[int] | None = None) -> None:
        """Kill ranks at once; all, if none are named."""
        for number in self.ranks if numbers is None else numbers:
            if self.ranks[number].is_running:
                self._server.signal(number, signal.SIGKILL)
        self._have_ended(SECONDS_TO_END, numbers)

    def close(self, *, gently: bool = True) -> list[str]:
        """End everything, the server included, and return what went wrong on ranks then.

        Args:
            gently: Let ranks end by themselves.
        """
        problems: list[str] = []
        try:
            if gently:
                with contextlib.suppress(LaunchError):
                    problems = self.retire()
        finally:
            self._server.close()
            self._let_go()
            self._selector.close()
        return problems

    def _let_go(self) -> None:
        for rank in self.ranks.values():
            self._hang_up(rank)
            for file in (rank.output, rank.errors, rank.crashes):
                if file is not None:
                    file.close()
        self.ranks.clear()

    def _have_ended(self, seconds: float, numbers: Iterable[int] | None = None) -> bool:
        ranks = [self.ranks[number] for number in (self.ranks if numbers is None else numbers)]
        return self.wait(lambda: not any(rank.is_running for rank in ranks), _in(seconds))

    def _start(self, number: int, call: bytes, variables: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        rank = PooledRank(
            connection=ours,
            output=_file() if self._captured else None,
            errors=_file() if self._captured else None,
            crashes=_file(),
        )
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear(rank))
        self.ranks[number] = rank
        output = 1 if rank.output is None else rank.output.fileno()
        errors = 2 if rank.errors is None else rank.errors.fileno()
        with theirs:
            self._server.start(number, [theirs.fileno(), output, errors, rank.crashes.fileno()])
        environ = {**self._environ, **variables, MARK: self._server.mark}
        rank.send(StartRequest(environ=environ, kind=TargetKind.FUNCTION_WITH_CONNECTION, call=call))

    def _hear(self, rank: PooledRank) -> None:
        if rank.connection.fileno() < 0:
            return
        piece = receive_available(rank.connection)
        if piece:
            rank.inbox += piece
            messages = pop_messages(rank.inbox)
            rank.messages += messages
            rank.is_over = rank.is_over or any(isinstance(message, WorkerResult) for message in messages)
        else:
            self._hang_up(rank)

    def _hang_up(self, rank: PooledRank) -> None:
        if rank.connection.fileno() >= 0:
            self._selector.unregister(rank.connection)
            rank.connection.close()

    def _hear_server(self) -> None:
        for event, number, value, _ in self._server.hear():
            if event == Event.SWEPT:
                self._swept = True
            elif event == Event.REFUSED:
                raise LaunchError(f"rank {number} cannot be started here: {os.strerror(value)}")
            elif event == Event.STARTED:
                self.ranks[number].pid = value
            else:
                self._note_end(self.ranks[number], value)

    def _note_end(self, rank: PooledRank, exitcode: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while rank.connection.fileno() >= 0:
                rank.connection.setblocking(False)
                self._hear(rank)  # what it said before its end is here already
        rank.exitcode = exitcode


def _in(seconds: float) -> Callable[[], float]:
    """Return a deadline so far from now."""
    deadline = time.monotonic() + seconds
    return lambda: deadline


def _file() -> IO[bytes]:
    """Return a file without a name that is written at its end, whoever writes."""
    return tempfile.TemporaryFile("a+b", buffering=0)


def _rest(file: IO[bytes] | None) -> str:
    """Return what is in a file, and empty it."""
    if file is None:
        return ""
    file.seek(0)
    data = file.read()
    if data:
        file.truncate(0)
    return data.decode(errors="replace")
