"""What ranks print while pytest captures nothing (`-s`): whole lines, each with its rank's label, to one output.

The ranks have the standard streams of pytest's own process, so that a debugger finds the terminal there. A rank holds a
line until its end, or until it is flushed as a question or a progress bar is, and writes while it has a lock that all
ranks share. What compiled code and other programs print does not come this way, and has no label.
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

from rankwise._launch.output import line_prefix

# Who has written the last line of an output, if the line was not finished: a process, and a descriptor of it.
_WRITER: Final = struct.Struct("<qq")
_NOBODY: Final = (0, 0)
# How long the rest of a line may take to come where Python does not buffer: it writes a text and its newline apart.
_REST_SECONDS: Final = 0.05
_STREAMS: Final = ("stdout", "stderr")


class OutputLock:
    """The lock that ranks share, and whose line is unfinished: a file, a part of which stands for each output."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.RLock()  # between threads, as the file's is between processes
        os.register_at_fork(after_in_child=self._renew)

    @contextlib.contextmanager
    def taken(self, offset: int) -> Iterator[tuple[int, int]]:
        """Have the turn at an output in the block, and yield who has left a line unfinished there."""
        with self._lock:
            with contextlib.suppress(OSError):  # a file system without locks: lines may mix there
                fcntl.lockf(self._file, fcntl.LOCK_EX, _WRITER.size, offset)
            try:
                data = os.pread(self._file, _WRITER.size, offset)
                yield _WRITER.unpack(data) if len(data) == _WRITER.size else _NOBODY
            finally:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._file, fcntl.LOCK_UN, _WRITER.size, offset)

    def leave(self, offset: int, writer: tuple[int, int]) -> None:
        """Write down whose line is unfinished."""
        os.pwrite(self._file, _WRITER.pack(*writer), offset)

    def _renew(self) -> None:
        self._lock = threading.RLock()  # a thread that held it is not in the child


class LabelledStream(io.BufferedIOBase):
    """What is below `sys.stdout` or `sys.stderr` of a rank, with a text layer that buffers lines, or nothing."""

    def __init__(self, raw: io.FileIO, turns: OutputLock, offset: int, *, is_unbuffered: bool) -> None:
        """Write to a descriptor.

        Args:
            raw: The descriptor.
            turns: Taken while something is written.
            offset: What stands there for this output.
            is_unbuffered: Nothing is held for longer than a moment.
        """
        self.raw = raw
        self.name = raw.name
        self.mode = "wb"
        self.label = b""
        self._turns = turns
        self._offset = offset
        self._output = os.fstat(raw.fileno())
        self._is_unbuffered = is_unbuffered
        self._held = bytearray()
        self._will_show = False

    def write(self, data: Any) -> int:  # noqa: ANN401 - whatever has bytes
        piece = bytes(data)
        self._held += piece
        if self._is_unbuffered:
            if piece.endswith((b"\n", b"\r")):
                self.flush()
            elif not self._will_show:
                self._will_show = True
                _thread.start_new_thread(self._show_soon, ())  # which a test that counts threads does not find
        return len(piece)

    def flush(self) -> None:
        if not self._held:
            return
        with self._turns.taken(self._offset) as unfinished:
            text = bytes(self._held)
            del self._held[: len(text)]
            if not text:  # another thread has written it
                return
            if not os.path.samestat(os.fstat(self.raw.fileno()), self._output):
                self._write(text)  # captured by the test
                return
            own = os.getpid(), self.raw.fileno()
            first, *others = text.splitlines(keepends=True)
            labelled = [first if unfinished == own else self.label + first, *(self.label + line for line in others)]
            self._write(b"\n" * (unfinished not in {own, _NOBODY}) + b"".join(labelled))
            self._turns.leave(self._offset, _NOBODY if text.endswith((b"\n", b"\r")) else own)

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

    def _show_soon(self) -> None:
        time.sleep(_REST_SECONDS)
        self._will_show = False
        with contextlib.suppress(OSError, ValueError):
            self.flush()


def share_standard_streams(path: str) -> list[LabelledStream]:
    """Let `sys.stdout` and `sys.stderr` of this process be shared by all that name the same file, and return them."""
    turns = OutputLock(path)
    shared: list[LabelledStream] = []
    for name in _STREAMS:
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            continue
        output = os.fstat(stream.fileno())
        # As a rule both are one terminal.
        same = [other for other in shared if os.path.samestat(os.fstat(other.fileno()), output)]
        is_unbuffered = bool(getattr(stream, "write_through", False))
        raw = io.FileIO(stream.fileno(), "w", closefd=False)
        raw.name = stream.name
        labelled = LabelledStream(raw, turns, 0 if same else len(shared) * _WRITER.size, is_unbuffered=is_unbuffered)
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
    """Let what is printed from now on have the label of a rank; none in a world of one."""
    for labelled in shared:
        labelled.flush()
        labelled.label = line_prefix(rank, world_size, coloured=labelled.isatty()) if world_size > 1 else b""
