"""The output of ranks while pytest captures nothing (`-s`): whole lines, each with its rank's label, on one output.

The ranks have the standard streams of pytest's own process, so that a debugger finds the terminal there. A rank buffers
a line until its end, or until it is flushed as a question or a progress bar is, and writes while it holds a lock that
all ranks share. The output of compiled code and of other programs is not buffered, and has no label.
"""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import io
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, TextIO

from rankwise._launch.output.line_prefix import line_prefix
from rankwise.testing._plugin.timeouts import REST_OF_LINE_SECONDS

# The writer of the last line of an output, if the line is unfinished: a process id, and a descriptor of that process.
_WRITER: Final = struct.Struct("<qq")
_NOBODY: Final = (0, 0)
_STREAMS: Final = ("stdout", "stderr")


class OutputLock:
    """A lock for each output, shared by all ranks, with the writer of an unfinished line: ranges of one file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.RLock()  # between threads; the file's lock is between processes
        os.register_at_fork(after_in_child=self._renew)

    @contextlib.contextmanager
    def held(self, offset: int) -> Iterator[tuple[int, int]]:
        """Hold the lock of an output in the block, and yield the writer of an unfinished line there."""
        with self._lock:
            with contextlib.suppress(OSError):  # a file system without locks: lines may mix there
                fcntl.lockf(self._file, fcntl.LOCK_EX, _WRITER.size, offset)
            try:
                data = os.pread(self._file, _WRITER.size, offset)
                yield _WRITER.unpack(data) if len(data) == _WRITER.size else _NOBODY
            finally:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._file, fcntl.LOCK_UN, _WRITER.size, offset)

    def set_unfinished(self, offset: int, writer: tuple[int, int]) -> None:
        """Store the writer of the unfinished line. Call with the lock held."""
        os.pwrite(self._file, _WRITER.pack(*writer), offset)

    def _renew(self) -> None:
        self._lock = threading.RLock()  # a thread that held the lock does not exist in the child


class LabelledStream(io.BufferedIOBase):
    """The binary layer of `sys.stdout` or `sys.stderr` of a rank, below a text layer that buffers lines, or nothing."""

    def __init__(self, raw: io.FileIO, lock: OutputLock, offset: int, *, is_unbuffered: bool) -> None:
        """Write to a descriptor.

        Args:
            raw: The descriptor.
            lock: Held during a write.
            offset: The position of this output in the lock's file.
            is_unbuffered: An unfinished line is written after a moment.
        """
        self.raw = raw
        self.name = raw.name
        self.mode = "wb"
        self.label = b""
        self._lock = lock
        self._offset = offset
        self._output = os.fstat(raw.fileno())
        self._is_unbuffered = is_unbuffered
        self._buffer = bytearray()
        self._will_flush = False

    def write(self, data: Any) -> int:  # noqa: ANN401 - any object with bytes
        piece = bytes(data)
        self._buffer += piece
        if self._is_unbuffered:
            if piece.endswith((b"\n", b"\r")):
                self.flush()
            elif not self._will_flush:
                self._will_flush = True
                _thread.start_new_thread(self._flush_soon, ())  # not `threading`: a test may count its threads
        return len(piece)

    def flush(self) -> None:
        if not self._buffer:
            return
        with self._lock.held(self._offset) as unfinished:
            text = bytes(self._buffer)
            del self._buffer[: len(text)]
            if not text:  # another thread has written it
                return
            if not os.path.samestat(os.fstat(self.raw.fileno()), self._output):
                self._write(text)  # the descriptor was redirected, as capfd does; the test expects no label
                return
            own = os.getpid(), self.raw.fileno()
            first, *others = text.splitlines(keepends=True)
            labelled = [first if unfinished == own else self.label + first, *(self.label + line for line in others)]
            self._write(b"\n" * (unfinished not in {own, _NOBODY}) + b"".join(labelled))
            self._lock.set_unfinished(self._offset, _NOBODY if text.endswith((b"\n", b"\r")) else own)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.raw.fileno()

    def isatty(self) -> bool:
        return self.raw.isatty()

    def _write(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest:
            rest = rest[os.write(self.raw.fileno(), rest) :]

    def _flush_soon(self) -> None:
        time.sleep(REST_OF_LINE_SECONDS)
        self._will_flush = False
        with contextlib.suppress(OSError, ValueError):
            self.flush()


def share_standard_streams(path: str) -> list[LabelledStream]:
    """Replace `sys.stdout` and `sys.stderr` by labelled streams, and return these.

    Args:
        path: The lock's file, the same in all processes that share the output.
    """
    lock = OutputLock(path)
    shared: list[LabelledStream] = []
    for name in _STREAMS:
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            continue
        output = os.fstat(stream.fileno())
        # Both are usually one terminal, and have one lock then.
        same = [other for other in shared if os.path.samestat(os.fstat(other.fileno()), output)]
        is_unbuffered = bool(getattr(stream, "write_through", False))
        raw = io.FileIO(stream.fileno(), "w", closefd=False)
        raw.name = stream.name
        labelled = LabelledStream(raw, lock, 0 if same else len(shared) * _WRITER.size, is_unbuffered=is_unbuffered)
        shared.append(labelled)
        text = io.TextIOWrapper(
            labelled,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=not is_unbuffered,
            write_through=is_unbuffered,
        )
        text.mode = "w"  # type: ignore[misc]  # as the interpreter sets it
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    return shared


def set_label(shared: list[LabelledStream], rank: int, world_size: int) -> None:
    """Set the label of the following output to that of a rank; none in a world of one."""
    for labelled in shared:
        labelled.flush()
        labelled.label = line_prefix(rank, world_size, coloured=labelled.isatty()) if world_size > 1 else b""
