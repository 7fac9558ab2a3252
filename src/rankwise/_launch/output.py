"""The output of ranks, shown line by line, with a prefix that names the rank."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, TextIO

from rankwise._arguments import as_bool, as_integer
from rankwise._launch.stream_writer import StreamWriter, TextStreamWriter, Writer
from rankwise.errors import InvalidArgumentError, shown

# How long the reader of the output may read nothing after the ranks have ended, until the rest is discarded: a person
# with a pager; a user who has stopped the launcher.
SECONDS_TO_READ: Final = 20.0
SECONDS_TO_READ_AFTER_STOP: Final = 2.0

# A longer line is shown in parts, so that the buffer stays small.
_LONGEST_LINE: Final = 1 << 16
_ERASE_LINE: Final = b"\x1b[2K"
_COLOURS: Final = (36, 32, 33, 35, 34, 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How a launcher shows the output of ranks, on its own standard output and standard error.

    Attributes:
        prefix: Whether each line begins with the rank that printed it, if there are several ranks.
        show: The ranks whose output is shown; None for all. Errors of all ranks are reported.

    Raises:
        InvalidArgumentError: `prefix` is not a bool, or `show` is not a collection of ranks.

    Example:
        >>> Output(show={0})
        Output(prefix=True, show={0})
    """

    prefix: bool = True
    show: Collection[int] | None = None

    def __post_init__(self) -> None:
        as_bool(self.prefix, "prefix")
        if self.show is not None and (isinstance(self.show, str) or not isinstance(self.show, Collection)):
            raise InvalidArgumentError(f"show={shown(self.show)} is not a collection of ranks, such as {{0, 1}}")
        for rank in self.show or ():
            as_integer(rank, "a rank of show")

    def console(self, nproc: int) -> Console:
        """Return the console of a launcher with so many ranks on this host."""
        return Console(nproc=nproc, shown=self.show, prefixed=self.prefix)


class Console:
    """The launcher's standard streams, or their replacements as in a notebook, where the output of ranks is shown.

    Attributes:
        prefixed: Each line begins with the rank that printed it.
        unfinished: For each writer, the output whose line was shown last, if that line has no end yet.
        status_writer: The writer whose last line is a status, to be erased before anything else is shown.
        on_writable: Called, from any thread, when a writer that was full accepts data again.
    """

    def __init__(self, *, nproc: int, shown: Collection[int] | None = None, prefixed: bool = True) -> None:
        """Prepare.

        Args:
            nproc: The number of ranks on this host.
            shown: The ranks whose output is shown; None for all.
            prefixed: Each line begins with the rank that printed it, if there are several ranks.
        """
        self.prefixed = prefixed and nproc > 1
        self.unfinished: dict[Writer, RankOutput] = {}
        self.status_writer: Writer | None = None
        self.on_writable: Callable[[], None] = lambda: None
        self._nproc = nproc
        self._has_several_ranks = nproc > 1
        self._is_inherited = False
        self._shown = shown
        self._writers: dict[object, Writer] = {}

    def show_status(self, text: str, *, last: bool = False) -> None:
        """Show a line on a terminal; unless it is the last one, other output replaces it."""
        writer = self._writer(sys.stderr) if self._has_several_ranks and _is_terminal(sys.stderr) else None
        if writer is not None:
            writer.write((text + ("\n" if last else "\r")).encode())
            self.status_writer = None if last else writer

    def print_message(self, text: str) -> None:
        """Show a message of the launcher on standard error."""
        writer = self._writer(sys.stderr)
        if writer is not None:
            # Where a rank has inherited the descriptor, the launcher cannot know whether its last line has an end.
            is_unfinished = self.unfinished.pop(writer, None) is not None or self._is_inherited
            separator = b"\n" if is_unfinished else b""
            writer.write(self.erase_status(writer) + separator + text.encode(errors="replace") + b"\n")

    def erase_status(self, writer: Writer) -> bytes:
        """Return the bytes that erase a status line of that writer; b"" if it shows none."""
        if self.status_writer is not writer:
            return b""
        self.status_writer = None
        return _ERASE_LINE

    def drain(self, seconds: float) -> list[str]:
        """Wait until all output is written, and return a message for each stream that has lost some.

        Args:
            seconds: How long to wait for a reader that reads nothing; the rest is discarded then.
        """
        writers, self._writers = self._writers, {}
        return [lost for writer in writers.values() if (lost := writer.drain(seconds))]

    def inheritable_descriptor(self, stream: TextIO | None) -> int | None:
        """Return the descriptor of a stream, if a rank may write to it directly, as a program does that runs alone."""
        if self._has_several_ranks or self._shown is not None or stream is None or not _is_original(stream):
            return None
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):
            return None
        self._is_inherited = True
        return descriptor

    def open(self, rank: int, stream: TextIO | None) -> RankOutput:
        """Return the display for a rank's output on a stream."""
        if stream is None or (self._shown is not None and rank not in self._shown):
            return RankOutput(self, b"", None)
        prefix = line_prefix(rank, self._nproc, coloured=_is_terminal(stream)) if self.prefixed else b""
        return RankOutput(self, prefix, self._writer(stream))

    def _writer(self, stream: TextIO | None) -> Writer | None:
        """Return the writer for a stream; None if there is no such stream, as after `>&-`."""
        if stream is None:
            return None
        if not _is_original(stream):
            return self._writers.setdefault(stream, TextStreamWriter(stream))
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # the output of this process comes first
        try:
            descriptor = stream.fileno()
            file = os.fstat(descriptor)
        except (OSError, ValueError):
            return None
        # Both streams are usually one terminal: a single writer keeps whole lines in their order.
        name = "standard output" if stream is sys.__stdout__ else "standard error"
        key = file.st_dev, file.st_ino
        return self._writers.setdefault(key, StreamWriter(descriptor, name, on_writable=self._call_on_writable))

    def _call_on_writable(self) -> None:
        self.on_writable()  # looked up now: a supervisor may have set it after the writer was made


class RankOutput:
    """The display of one rank's output on one stream. A line is shown as soon as it is whole."""

    def __init__(self, console: Console, prefix: bytes, writer: Writer | None) -> None:
        self._console = console
        self._closed = False
        self._prefix = prefix
        self._writer = writer
        self._buffer = b""

    @property
    def is_full(self) -> bool:
        """The writer has too much unwritten data."""
        return self._writer is not None and self._writer.is_full

    def write(self, data: bytes) -> bool:
        """Buffer output of the rank, and show its whole lines; return False if nobody reads them any more."""
        self._buffer += data
        # A progress bar ends each of its lines with a carriage return.
        end = max(self._buffer.rfind(b"\n"), self._buffer.rfind(b"\r")) + 1
        if not end and len(self._buffer) > _LONGEST_LINE:
            end = len(self._buffer)
        whole, self._buffer = self._buffer[:end], self._buffer[end:]
        self._show(whole)
        return not self._closed

    def flush(self) -> None:
        """Show a line that is not whole yet, such as a prompt."""
        rest, self._buffer = self._buffer, b""
        self._show(rest)

    def _show(self, text: bytes) -> None:
        if not text or self._writer is None or self._closed:
            return
        unfinished = self._console.unfinished.pop(self._writer, None)
        lines = text.splitlines(keepends=True)
        shown = b"".join(
            [b"" if unfinished is self else self._prefix, lines[0], *(self._prefix + line for line in lines[1:])]
        )
        if unfinished not in {None, self}:
            shown = b"\n" + shown
        if not text.endswith((b"\n", b"\r")):
            self._console.unfinished[self._writer] = self
        self._closed = not self._writer.write(self._console.erase_status(self._writer) + shown)


def line_prefix(rank: int, nproc: int, *, coloured: bool) -> bytes:
    """Return the prefix of each line of a rank; it has the same width for all ranks."""
    text = f"[{rank:>{len(str(nproc - 1))}}] "
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m" if coloured else text).encode()


def _is_original(stream: TextIO) -> bool:
    return stream in (sys.__stdout__, sys.__stderr__)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False
