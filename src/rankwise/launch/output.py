"""What ranks print, shown line by line, with the rank in front of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Final, TextIO

# A line that is longer is shown in parts, so that nothing is kept for ever.
_LONGEST_LINE: Final = 1 << 16
_WIPE: Final = b"\x1b[2K"
_COLOURS: Final = (36, 32, 33, 35, 34, 31)


class Screen:
    """Where the output of ranks goes: the launcher's own, or what stands in for it, as in a notebook.

    Attributes:
        prefixed: Each line says which rank it is from.
        unfinished: Whose line was shown last, if its end was not.
        noted: A note is to be wiped before anything else is shown.
    """

    def __init__(self, *, nproc: int, shown: Collection[int] | None = None, prefixed: bool = True) -> None:
        self.prefixed = prefixed and nproc > 1
        self.unfinished: Lines | None = None
        self.noted = False
        self._apart = nproc > 1
        self._shown = shown
        self._width = len(str(nproc - 1))

    def note(self, text: str, *, last: bool = False) -> None:
        """Show a line on a terminal, until something else is shown if it is not the last."""
        if self._apart and _is_terminal(sys.stderr):
            sys.stderr.write(text + ("\n" if last else "\r"))
            sys.stderr.flush()
            self.noted = not last

    def direct(self, stream: TextIO) -> int | None:
        """Return the descriptor that a rank may write to itself, as a program does that runs alone."""
        if self._apart or self._shown is not None or stream not in (sys.__stdout__, sys.__stderr__):
            return None
        try:
            return stream.fileno()
        except (OSError, ValueError):
            return None

    def open(self, rank: int, stream: TextIO) -> Lines:
        """Return what shows a rank's output."""
        if self._shown is not None and rank not in self._shown:
            return Lines(self, b"", None)
        prefix = f"[{rank:>{self._width}}] " if self.prefixed else ""
        if prefix and _is_terminal(stream):
            prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        return Lines(self, prefix.encode(), stream)


class Lines:
    """The output of one rank, shown as soon as a line of it is whole."""

    def __init__(self, screen: Screen, prefix: bytes, stream: TextIO | None) -> None:
        self._screen = screen
        self._closed = False
        self._prefix = prefix
        self._stream = stream
        self._rest = b""

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
        if not text or self._stream is None or self._closed:
            return
        unfinished = self._screen.unfinished
        lines = text.splitlines(keepends=True)
        shown = b"".join(
            [b"" if unfinished is self else self._prefix, lines[0], *(self._prefix + line for line in lines[1:])]
        )
        if unfinished not in {None, self}:
            shown = b"\n" + shown
        if self._screen.noted:
            shown = _WIPE + shown
            self._screen.noted = False
        self._screen.unfinished = None if text.endswith((b"\n", b"\r")) else self
        try:
            _write(self._stream, shown)
        except (OSError, ValueError):
            self._closed = True


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError):
        return False


def _write(stream: TextIO, text: bytes) -> None:
    """Write to a stream of the launcher's; past its buffer where it is a real one, so that bytes stay what they are."""
    if stream in (sys.__stdout__, sys.__stderr__):
        stream.flush()
        descriptor = stream.fileno()
        while text:
            text = text[os.write(descriptor, text) :]
    else:
        stream.write(text.decode(errors="replace"))
        stream.flush()
