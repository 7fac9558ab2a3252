"""Writing to a stream of the launcher's, which nobody may be reading: a pager waits, a terminal is stopped.

A thread writes, so that the loop that watches the ranks goes on. Two other ways were not taken. A descriptor that is
made non-blocking is so for every process that shares it, as the shell does. And one that `poll` calls writable may
block still: a terminal has room for less than is written, or another process fills the pipe first.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from os import strerror, write
from typing import Final, Protocol, TextIO

from rankwise._net.polling import ATOMIC_WRITE_BYTES, WRITABLE, poll

# From here on ranks are not read any more. They go on as far as their pipes reach, and wait then, as alone they would.
_BACKLOG_BYTES: Final = 1 << 20


class Sink(Protocol):
    """Where lines go."""

    @property
    def is_full(self) -> bool:
        """Nothing more should be written for now."""

    def write(self, text: bytes) -> bool:
        """Write; False if that is in vain from now on."""

    def drain(self, seconds: float) -> str:
        """Wait until all is written, or nobody has read anything for so long; return what was lost, in words."""


class StreamWriter:
    """A sink that is a descriptor of the launcher's."""

    def __init__(self, descriptor: int, name: str, *, has_room: Callable[[], None]) -> None:
        """Write to a descriptor.

        Args:
            descriptor: Where to.
            name: What messages call it.
            has_room: Called by the thread when a sink that was full has room again, or writing has failed.
        """
        self._descriptor = descriptor
        self._name = name
        self._has_room = has_room
        self._changed = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._unwritten = 0
        self._written = 0
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_full(self) -> bool:
        return self._unwritten >= _BACKLOG_BYTES

    def write(self, text: bytes) -> bool:
        with self._changed:
            if self._error is not None:
                return False
            self._pieces.append(text)
            self._unwritten += len(text)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="rankwise-writer")
                self._thread.start()
        return True

    def drain(self, seconds: float) -> str:
        lost = 0
        try:
            self._wait(seconds)
        finally:  # also when Ctrl-C ends the wait
            with self._changed:
                lost, self._unwritten = self._unwritten, 0
                self._pieces.clear()
                thread, self._thread = self._thread, None
                self._changed.notify_all()
        if thread is not None and not lost:
            thread.join()
        if self._error is not None:
            problem = strerror(self._error.errno or 0)
            return f"{self._name} could not be written: {problem}; what ranks printed from then on is lost"
        if lost:
            return f"nobody read {self._name} for {seconds:g} s: the last {lost} bytes for it are discarded"
        return ""

    def _wait(self, seconds: float) -> None:
        with self._changed:
            written, deadline = self._written, time.monotonic() + seconds
            while self._unwritten and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
                if self._written != written:
                    written, deadline = self._written, time.monotonic() + seconds

    def _run(self) -> None:
        # The main thread hears signals, and its loop goes on when it does. SIGTTOU is for whoever writes.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGTTOU})
        while piece := self._next():
            rest = memoryview(piece)
            while rest and self._thread is threading.current_thread():  # else it was discarded
                try:
                    rest = rest[self._write(rest[:ATOMIC_WRITE_BYTES]) :]
                except OSError as error:
                    self._give_up(error)
                    return

    def _next(self) -> bytes:
        """Return what is to be written next; b"" if this thread's work is done."""
        with self._changed:
            while not self._pieces:
                if self._thread is not threading.current_thread():
                    return b""
                self._changed.wait()
            return self._pieces.popleft()

    def _write(self, piece: memoryview) -> int:
        """Write some of a piece, and return how much."""
        try:
            size = write(self._descriptor, piece)
        except BlockingIOError:  # somebody else has made it non-blocking
            poll({self._descriptor: WRITABLE})
            return 0
        with self._changed:
            self._written += size
            before, self._unwritten = self._unwritten, max(0, self._unwritten - size)  # 0 if it was discarded meanwhile
            self._changed.notify_all()
        if self._unwritten < _BACKLOG_BYTES // 2 <= before:
            self._has_room()
        return size

    def _give_up(self, error: OSError) -> None:
        with self._changed:
            self._error = error
            self._unwritten = 0
            self._pieces.clear()
            self._changed.notify_all()
        self._has_room()


class StandIn:
    """A sink for what stands in for a standard stream, as in a notebook or a test: written in the caller's thread."""

    is_full = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: bytes) -> bool:
        try:
            self._stream.write(text.decode(errors="replace"))
            self._stream.flush()
        except (OSError, ValueError):
            return False
        return True

    def drain(self, seconds: float) -> str:  # noqa: ARG002 - nothing is left to wait for
        return ""
