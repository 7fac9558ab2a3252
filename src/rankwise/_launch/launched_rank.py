"""A rank of `launch`: its output, its result, and how it ended."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rankwise._launch.forkserver.ipc import Leaving, TerminalRequest, WorkerResult
from rankwise._launch.output.console import RankOutput
from rankwise._launch.rank_process import RankProcess


@dataclass(slots=True, kw_only=True)
class LaunchedRank(RankProcess):
    """A rank of `launch`.

    Attributes:
        output, errors: The displays of its standard output and standard error.
        on_terminal_request: Called when it wants the terminal, with True, or returns it.
        on_leaving: Called when it leaves its session with an error.
        is_program: Its target is a program, such as a shell that waits for its children and forwards no signals.
        result: The result of its target, once it is received.
        crash: The stacks of its threads, if it crashed.
        signals: The signals that were sent to stop it, because another rank failed or the launcher was stopped.
        lingers: Its target has failed, and its process did not end in time.
    """

    output: RankOutput
    errors: RankOutput
    on_terminal_request: Callable[[bool], None]
    on_leaving: Callable[[Leaving], None]
    is_program: bool = False
    result: WorkerResult | None = None
    crash: bytes = b""
    signals: set[int] = field(default_factory=set)
    lingers: bool = False

    @property
    def has_failed(self) -> bool:
        """The process has ended with an error, or should have."""
        return self.exitcode not in {None, 0} or self.lingers

    @property
    def has_crashed(self) -> bool:
        """The process was ended by a signal."""
        return self.exitcode is not None and self.exitcode < 0

    @property
    def was_stopped(self) -> bool:
        """The process was ended by a signal that was sent to stop it, and its target had not failed by itself."""
        failed = self.result is not None and self.result.status != 0
        return self.exitcode is not None and -self.exitcode in self.signals and not failed

    @property
    def has_timed_out(self) -> bool:
        """Its target has failed because others did not come in time: by its exception, of rankwise or of torch."""
        failure = None if self.result is None else self.result.failure
        return failure is not None and re.search("time(d )?out", failure.raised, re.IGNORECASE) is not None

    def update_lingers(self, seconds: float) -> None:
        """Set `lingers` if the target failed so many seconds ago that the process should have ended."""
        if self.is_running and self.result is not None and self.result.status:
            self.lingers = time.monotonic_ns() - self.result.time_ns >= seconds * 1e9

    def handle(self, message: WorkerResult | TerminalRequest | Leaving) -> None:
        """Keep the result, or pass on what is more than that."""
        if isinstance(message, TerminalRequest):
            self.on_terminal_request(message.wanted)
        elif isinstance(message, Leaving):
            self.on_leaving(message)
        else:
            self.result = message

    def add_crash(self, data: bytes) -> None:
        """Keep a part of the stacks of its threads."""
        self.crash += data

    def write_end_to_log(self) -> None:
        """Add the traceback of its exception, or the stacks after a crash, to its log: the launcher has them alone."""
        if self.result is not None and self.result.failure is not None:
            self.errors.write_log(self.result.failure.traceback.encode(errors="backslashreplace"))
        if self.crash:
            self.errors.write_log(self.crash)
