"""Writing to a stream of the launcher whose reader may be stalled: a pager that waits, a terminal that is stopped.

A thread writes, so that the event loop that watches the ranks never blocks. Two alternatives do not work. To make a
descriptor non-blocking changes it for every process that shares it, such as the shell. And a descriptor that `poll`
reports as writable may still block: a terminal has less free space than the data, or another process fills the pipe.
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

# With more unwritten data than this, the pipes of ranks are not read. Ranks continue until their pipes are full, and
# then block, as they would without a launcher.
_BACKLOG_BYTES: Final = 1 << 20


class Writer(Protocol):
    """A destination of output."""

    @property
    def is_full(self) -> bool:
        """There is so much unwritten data that no more should be added for now."""

    def write(self, text: bytes) -> bool:
        """Write data; return False if nothing can be written any more."""

    def wait(self, seconds: float) -> None:
        """Wait until all data is written, or nothing was read for that long."""

    def drain(self, seconds: float) -> str:
        """Wait until all data is written, or nothing was read for that long; return a message if some was lost."""


class StreamWriter:
    """A writer for a descriptor of the launcher."""

    def __init__(self, descriptor: int, name: str, *, on_writable: Callable[[], None]) -> None:
        """Prepare. The thread starts at the first write.

        Args:
            descriptor: The descriptor.
            name: Its name in messages.
            on_writable: Called by the thread when the writer is no longer full, or writing has failed.
        """
        self._descriptor = descriptor
        self._name = name
        self._on_writable = on_writable
        self._changed = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._unwritten = 0
        self._written = 0
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_full(self) -> bool:
        return self._unwritten >= _BACKLOG_BYTES

    @property
    def failure(self) -> str:
        """Why nothing can be written any more; "" if something can."""
        if self._error is None:
            return ""
        problem = strerror(self._error.errno or 0)
        return f"{self._name} could not be written: {problem}; what ranks printed from then on is lost"

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
            self.wait(seconds)
        finally:  # also when Ctrl-C ends the wait
            with self._changed:
                lost, self._unwritten = self._unwritten, 0
                self._pieces.clear()
                thread, self._thread = self._thread, None
                self._changed.notify_all()
        if thread is not None and not lost:
            thread.join()
        if self._error is not None:
            return self.failure
        if lost:
            return f"nobody read {self._name} for {seconds:g} s: the last {lost} bytes for it are discarded"
        return ""

    def wait(self, seconds: float) -> None:
        with self._changed:
            written, deadline = self._written, time.monotonic() + seconds
            while self._unwritten and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
                if self._written != written:
                    written, deadline = self._written, time.monotonic() + seconds

    def _run(self) -> None:
        # Signals are left to the main thread: they interrupt the wait of its event loop. Only SIGTTOU, which stops a
        # background job that writes to its terminal, has to reach the thread that writes.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGTTOU})
        while (piece := self._next()) is not None:
            rest = memoryview(piece)
            while rest and self._thread is threading.current_thread():  # else `drain` has discarded the data
                try:
                    rest = rest[self._write(rest[:ATOMIC_WRITE_BYTES]) :]
                except OSError as error:
                    self._fail(error)
                    return

    def _next(self) -> bytes | None:
        """Return the next piece to write; None if this thread has no more work."""
        with self._changed:
            while not self._pieces:
                if self._thread is not threading.current_thread():
                    return None
                self._changed.wait()
            return self._pieces.popleft()

    def _write(self, piece: memoryview) -> int:
        """Write a part of a piece, and return its size."""
        try:
            size = write(self._descriptor, piece)
        except BlockingIOError:  # another process has made the descriptor non-blocking
            poll({self._descriptor: WRITABLE})
            return 0
        with self._changed:
            self._written += size
            before, self._unwritten = self._unwritten, max(0, self._unwritten - size)  # 0 after `drain` discarded data
            self._changed.notify_all()
        # Half of the limit, so that reading is not paused and resumed for every piece.
        if self._unwritten < _BACKLOG_BYTES // 2 <= before:
            self._on_writable()
        return size

    def _fail(self, error: OSError) -> None:
        with self._changed:
            self._error = error
            self._unwritten = 0
            self._pieces.clear()
            self._changed.notify_all()
        self._on_writable()


class TextStreamWriter:
    """A writer for a replacement of a standard stream, as in a notebook or a test. It writes in the caller's thread."""

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

    def wait(self, seconds: float) -> None:
        pass

    def drain(self, seconds: float) -> str:  # noqa: ARG002 - everything is written already
        return ""
