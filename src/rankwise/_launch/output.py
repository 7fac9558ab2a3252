"""What ranks print, shown line by line, with the rank in front of each."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection
from typing import Final, TextIO

from rankwise._launch.stream_writer import Sink, StandIn, StreamWriter

# How long whoever reads what ranks have printed may read nothing after their end, until the rest is discarded: a person
# with a pager; somebody who has stopped the launcher.
SECONDS_TO_READ: Final = 20.0
SECONDS_TO_READ_AFTER_STOP: Final = 2.0

# A line that is longer is shown in parts, so that nothing is kept for ever.
_LONGEST_LINE: Final = 1 << 16
_WIPE: Final = b"\x1b[2K"
_COLOURS: Final = (36, 32, 33, 35, 34, 31)


class Console:
    """Where the output of ranks goes: the launcher's own, or what stands in for it, as in a notebook.

    Attributes:
        prefixed: Each line says which rank it is from.
        unfinished: Whose line was shown last, if its end was not; for each sink.
        noted: Where a note is to be wiped before anything else is shown.
        has_room: Called, from any thread, when lines that were held back can be shown again.
    """

    def __init__(self, *, nproc: int, shown: Collection[int] | None = None, prefixed: bool = True) -> None:
        self.prefixed = prefixed and nproc > 1
        self.unfinished: dict[Sink, Lines] = {}
        self.noted: Sink | None = None
        self.has_room: Callable[[], None] = lambda: None
        self._nproc = nproc
        self._apart = nproc > 1
        self._is_direct = False
        self._shown = shown
        self._sinks: dict[object, Sink] = {}

    def note(self, text: str, *, last: bool = False) -> None:
        """Show a line on a terminal, until something else is shown if it is not the last."""
        sink = self._sink(sys.stderr) if self._apart and _is_terminal(sys.stderr) else None
        if sink is not None:
            sink.write((text + ("\n" if last else "\r")).encode())
            self.noted = None if last else sink

    def say(self, text: str) -> None:
        """Show what the launcher itself has to say, as standard errors are shown."""
        sink = self._sink(sys.stderr)
        if sink is not None:
            # Where a rank writes by itself, nobody knows whether it has ended its line.
            is_unfinished = self.unfinished.pop(sink, None) is not None or self._is_direct
            apart = b"\n" if is_unfinished else b""
            sink.write(self.wiped(sink) + apart + text.encode(errors="replace") + b"\n")

    def wiped(self, sink: Sink) -> bytes:
        """Return what wipes a note that is shown there."""
        if self.noted is not sink:
            return b""
        self.noted = None
        return _WIPE

    def drain(self, seconds: float) -> list[str]:
        """Wait until all is written that was shown; return what was lost, in words, a line for each stream.

        Args:
            seconds: How long to wait for a reader that reads nothing; what is left then is discarded.
        """
        sinks, self._sinks = self._sinks, {}
        return [lost for sink in sinks.values() if (lost := sink.drain(seconds))]

    def direct(self, stream: TextIO | None) -> int | None:
        """Return the descriptor that a rank may write to itself, as a program does that runs alone."""
        if self._apart or self._shown is not None or stream is None or not _is_original(stream):
            return None
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):
            return None
        self._is_direct = True
        return descriptor

    def open(self, rank: int, stream: TextIO | None) -> Lines:
        """Return what shows a rank's output."""
        if stream is None or (self._shown is not None and rank not in self._shown):
            return Lines(self, b"", None)
        prefix = label(rank, self._nproc, coloured=_is_terminal(stream)) if self.prefixed else b""
        return Lines(self, prefix, self._sink(stream))

    def _sink(self, stream: TextIO | None) -> Sink | None:
        """Return what writes to a stream; None if there is no such stream, as after `>&-`."""
        if stream is None:
            return None
        if not _is_original(stream):
            return self._sinks.setdefault(stream, StandIn(stream))
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # what this process has printed comes first
        try:
            descriptor = stream.fileno()
            place = os.fstat(descriptor)
        except (OSError, ValueError):
            return None
        # As a rule both streams are one terminal, where lines that are whole are kept in their order.
        name = "standard output" if stream is sys.__stdout__ else "standard error"
        key = place.st_dev, place.st_ino
        return self._sinks.setdefault(key, StreamWriter(descriptor, name, has_room=self._tell_of_room))

    def _tell_of_room(self) -> None:
        self.has_room()  # a pool may have come since the sink is there


class Lines:
    """The output of one rank, shown as soon as a line of it is whole."""

    def __init__(self, screen: Console, prefix: bytes, sink: Sink | None) -> None:
        self._screen = screen
        self._closed = False
        self._prefix = prefix
        self._sink = sink
        self._rest = b""

    @property
    def is_held_back(self) -> bool:
        """What shows it has too much to show already."""
        return self._sink is not None and self._sink.is_full

    def add(self, data: bytes) -> bool:
        """Take what the rank wrote; False if nobody reads it any more."""
        self._rest += data
        # A progress bar goes back to the beginning of its line, and writes it again.
        end = max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r")) + 1
        if not end and len(self._rest) > _LONGEST_LINE:
            end = len(self._rest)
        whole, self._rest = self._rest[:end], self._rest[end:]
        self._show(whole)
        return not self._closed

    def show_rest(self) -> None:
        """Show a line that is not whole yet, as a question that waits for an answer."""
        rest, self._rest = self._rest, b""
        self._show(rest)

    def _show(self, text: bytes) -> None:
        if not text or self._sink is None or self._closed:
            return
        unfinished = self._screen.unfinished.pop(self._sink, None)
        lines = text.splitlines(keepends=True)
        shown = b"".join(
            [b"" if unfinished is self else self._prefix, lines[0], *(self._prefix + line for line in lines[1:])]
        )
        if unfinished not in {None, self}:
            shown = b"\n" + shown
        if not text.endswith((b"\n", b"\r")):
            self._screen.unfinished[self._sink] = self
        self._closed = not self._sink.write(self._screen.wiped(self._sink) + shown)


def label(rank: int, nproc: int, *, coloured: bool) -> bytes:
    """Return what stands before each line of a rank, as wide for all of them."""
    text = f"[{rank:>{len(str(nproc - 1))}}] "
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m" if coloured else text).encode()


def _is_original(stream: TextIO) -> bool:
    return stream in (sys.__stdout__, sys.__stderr__)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False
