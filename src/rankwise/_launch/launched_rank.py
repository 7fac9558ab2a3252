"""A rank that was started, as its launcher sees it."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

from rankwise._launch.forkserver.ipc import WorkerResult, pop_messages
from rankwise._launch.output import Lines


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """A rank that was started.

    Attributes:
        pid: Its process; 0 until it runs.
        connection: To what runs in it.
        output, errors: What shows what it prints.
        unsent: What it has not been told yet.
        inbox: What it has told, and was not read yet.
        outcome: How what it ran has ended, once it has told.
        exitcode: How its process ended, once it has.
        ended_ns: When, on the host's monotonic clock.
        crash: Its stack, if it crashed.
        is_program: It runs a program, as a shell that waits for what it has started and does not pass signals on.
        signals: Those that told it to end, because another one failed or somebody stopped the launcher.
        lingers: What it ran has failed, and its process did not end in time.
    """

    connection: socket.socket
    output: Lines
    errors: Lines
    unsent: memoryview
    pid: int = 0
    is_program: bool = False
    inbox: bytearray = field(default_factory=bytearray)
    result: WorkerResult | None = None
    exitcode: int | None = None
    ended_ns: int = 0
    crash: bytes = b""
    signals: set[int] = field(default_factory=set)
    lingers: bool = False

    @property
    def has_failed(self) -> bool:
        """Its process has ended with an error, or should have."""
        return self.exitcode not in {None, 0} or self.lingers

    @property
    def has_crashed(self) -> bool:
        """Its process has ended of a signal."""
        return self.exitcode is not None and self.exitcode < 0

    @property
    def was_stopped(self) -> bool:
        """Its process has ended of a signal that told it to, when what it ran had not failed by itself."""
        failed = self.result is not None and self.result.status != 0
        return self.exitcode is not None and -self.exitcode in self.signals and not failed

    def note_whether_it_lingers(self, seconds: float) -> None:
        """Take note if what it ran has failed so long ago that its process should have ended."""
        if self.exitcode is None and self.result is not None and self.result.status:
            self.lingers = time.monotonic_ns() - self.result.time_ns >= seconds * 1e9

    def pop_messages(self, piece: bytes) -> None:
        """Take what it has told; all of it is its outcome."""
        self.inbox += piece
        for result in pop_messages(self.inbox):
            self.result = result
