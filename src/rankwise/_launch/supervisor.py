"""The ranks of this host, as their launcher sees them: started, watched, told to end. One loop waits for everything."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final

from rankwise._launch.forkserver.client import ForkServer, receive_available
from rankwise._launch.forkserver.ipc import Event, StartRequest, TargetKind, serialize
from rankwise._launch.launched_rank import RankProcess
from rankwise._launch.output import SECONDS_TO_READ, SECONDS_TO_READ_AFTER_STOP, Console
from rankwise._launch.output_pipes import OutputPipes
from rankwise._launch.reaper import MARK, SECONDS_TO_END, adopt_orphans
from rankwise._launch.resource_limits import advice
from rankwise._text import ranks_text
from rankwise.errors import LaunchError

log = logging.getLogger(__name__)

# Signals that ranks get, and how long they may take to end of each before the next one; SIGKILL is the last.
FAILED: Final = ((signal.SIGTERM, 3.0),)
TERMINATED: Final = ((signal.SIGTERM, 30.0),)
# How long the last words of ranks that have ended may take to arrive: they are in the pipes already.
_DRAIN_SECONDS: Final = 0.2
# How long somebody who has stopped the launcher waits without knowing for whom.
_SILENT_SECONDS: Final = 1.0


def interrupted(grace: float) -> tuple[tuple[signal.Signals, float], ...]:
    """Return the signals that ranks get at Ctrl-C."""
    return (signal.SIGINT, grace), (signal.SIGTERM, 0.5)


class Supervisor:
    """The fork server, and the ranks that it forked. A context: nothing of either is left after it."""

    def __init__(
        self, environ: Mapping[str, str], *, screen: Console, preload: bool = True, owner: bool = False
    ) -> None:
        """Start the fork server.

        Args:
            environ: Its environment.
            screen: Where what ranks print is shown.
            preload: It imports torch, and forks ranks; if not, or not on Linux, ranks are fresh interpreters.
            owner: This process does nothing else, so whatever descends from it may be ended.
        """
        self.ranks: dict[int, RankProcess] = {}
        if owner:
            adopt_orphans()
        self._owner = owner
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._swept = False
        self._hurried = False
        self.stopped_ns = 0
        self._outlets = OutputPipes(self._selector, screen)
        self._server = ForkServer(environ, preload=preload, owner=owner)
        self._selector.register(self._server.control, selectors.EVENT_READ, self._hear_server)

    def __enter__(self) -> Supervisor:  # noqa: PYI034 - nobody derives from it, and Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(patiently=kind is None or issubclass(kind, Exception))

    def start(self, requests: Mapping[int, StartRequest]) -> None:
        """Start ranks.

        Raises:
            LaunchError: This host has no room for them, or the fork server could not start.
        """
        self._let_go()
        self.ranks.clear()
        self._swept = self._hurried = False
        self.stopped_ns = 0
        for rank, request in requests.items():
            self._start(rank, request)
        while any(not rank.pid for rank in self.ranks.values()):
            self.wait(1.0)

    def wait(self, seconds: float) -> None:
        """Wait until anything happens, and take note of it; for so long at the most.

        Raises:
            LaunchError: The fork server is gone.
        """
        ready = self._selector.select(max(0.0, seconds))
        for key, events in ready:
            key.data(events)
        if not ready and not self._outlets.are_held_back:
            self._show_rest()

    def say(self, text: str) -> None:
        """Show what the launcher has to say."""
        self._screen.say(text)

    def running(self) -> list[int]:
        """Return the ranks whose processes have not ended."""
        return [rank for rank, state in self.ranks.items() if state.exitcode is None]

    def stop(self, signals: Sequence[tuple[signal.Signals, float]], *, telling: bool = False) -> None:
        """End all ranks and what they started, and show the last that they printed.

        Called again before it was done, as at a second Ctrl-C, it does not wait any more.

        Args:
            signals: Those that a rank gets, each with the seconds that it may take to end of it.
            telling: Say for whom this waits, if it does.
        """
        if self._swept:
            return
        gently = () if self._hurried else signals
        self._hurried = True
        self.stopped_ns = self.stopped_ns or time.monotonic_ns()
        for number, seconds in (*gently, (signal.SIGKILL, SECONDS_TO_END)):
            for rank in self.running():
                self.ranks[rank].signals.add(number)
                self._server.signal(rank, number, to_all=self.ranks[rank].is_program)
            deadline = time.monotonic() + seconds
            if telling and number != signal.SIGKILL and seconds > _SILENT_SECONDS:
                self._wait_for_ends(deadline - seconds + _SILENT_SECONDS)
                self._tell_of_wait(seconds)
            self._wait_for_ends(deadline)
        self._sweep()

    def _wait_for_ends(self, deadline: float) -> None:
        while self.running() and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())

    def _tell_of_wait(self, seconds: float) -> None:
        if running := self.running():
            self.say(f"rankwise: {ranks_text(running)} may take {seconds:g} s to end; Ctrl-C ends them now")

    def _sweep(self) -> None:
        self._server.sweep()
        deadline = time.monotonic() + SECONDS_TO_END
        while not self._swept and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
        self._outlets.take_all()
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._outlets.are_open and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())

    def close(self, *, patiently: bool = True) -> None:
        """End everything at once, the fork server included.

        Args:
            patiently: Give a reader of what ranks have printed the time to read it.
        """
        self._server.close()
        self._let_go()
        self._selector.close()
        if not self._owner:  # a command has more to say
            lost = self._screen.drain(SECONDS_TO_READ if patiently else SECONDS_TO_READ_AFTER_STOP)
            for text in lost:
                log.warning(text)
        self._outlets.close()

    def _let_go(self) -> None:
        """Let go of the ranks, which have ended."""
        self._outlets.let_go()
        for rank in self.ranks.values():
            self._hang_up(rank)
            if rank.crash and not rank.has_crashed:
                rank.errors.add(rank.crash)  # a child of the rank did, as a worker of a data loader may
                rank.crash = b""
        self._show_rest()

    def _show_rest(self) -> None:
        for rank in self.ranks.values():
            rank.output.show_rest()
            rank.errors.show_rest()

    def _start(self, number: int, request: StartRequest) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            marked = replace(request, environ={**request.environ, MARK: self._server.mark})
            with contextlib.ExitStack() as descriptors:
                output, shown_output = self._outlets.open(number, sys.stdout)
                descriptors.callback(os.close, output)
                errors, shown_errors = self._outlets.open(number, sys.stderr)
                descriptors.callback(os.close, errors)
                rank = RankProcess(
                    connection=ours,
                    output=shown_output,
                    errors=shown_errors,
                    unsent=memoryview(serialize(marked)),
                    is_program=request.kind is TargetKind.PROGRAM,
                )
                crashes = self._outlets.pipe(lambda data: setattr(rank, "crash", rank.crash + data))
                descriptors.callback(os.close, crashes)
                self._selector.register(
                    ours, selectors.EVENT_READ | selectors.EVENT_WRITE, lambda events: self._talk(rank, events)
                )
                self.ranks[number] = rank
                self._server.start(number, [theirs.fileno(), output, errors, crashes])

    def _talk(self, rank: RankProcess, events: int) -> None:
        """Tell a rank what it is to be, and hear how that ended."""
        if rank.connection.fileno() < 0:
            return  # hung up since this was seen
        with contextlib.suppress(BlockingIOError):
            if events & selectors.EVENT_WRITE and rank.unsent:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    rank.unsent = rank.unsent[rank.connection.send(rank.unsent) :]
                    if rank.unsent:
                        return
                rank.unsent = memoryview(b"")
                self._selector.modify(rank.connection, selectors.EVENT_READ, lambda events: self._talk(rank, events))
            if events & selectors.EVENT_READ:
                self._hear(rank)

    def _hear(self, rank: RankProcess) -> None:
        piece = receive_available(rank.connection)
        if not piece:
            self._hang_up(rank)
            return
        rank.pop_messages(piece)

    def _hang_up(self, rank: RankProcess) -> None:
        if rank.connection.fileno() >= 0:
            self._selector.unregister(rank.connection)
            rank.connection.close()

    def _hear_server(self, _: int) -> None:
        for event, number, value, time_ns in self._server.hear():
            if event == Event.STARTED:
                self.ranks[number].pid = value
            elif event == Event.REFUSED:
                raise LaunchError(f"rank {number} cannot be started here: {os.strerror(value)}{advice(value)}")
            elif event == Event.SWEPT:
                self._swept = True
            else:
                self._note_end(self.ranks[number], value, time_ns)

    def _note_end(self, rank: RankProcess, exitcode: int, time_ns: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while rank.connection.fileno() >= 0:
                self._hear(rank)  # what it said before its end is here already
        rank.exitcode, rank.ended_ns = exitcode, time_ns
