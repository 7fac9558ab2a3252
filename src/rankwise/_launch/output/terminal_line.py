"""The last line of a terminal, which is replaced in place: a status of the launcher, or a rank's progress bar.

Other output is shown above it. Only the bar of one rank, the lowest, is shown: a bar ends with a carriage return in
place of a line feed, and several of them would overwrite each other.

Rank zero may draw bars in several lines, as rich and nested bars of tqdm do: its output then moves the cursor up and
down, and passes unchanged. Such a program draws its lines again and again, so that it is enough to know how far above
the cursor they begin: output of others is inserted there, in place of the old picture, and the next picture follows it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

_ERASE: Final = b"\x1b[2K"
_ESCAPE: Final = b"\x1b"
_COLOUR: Final = re.compile(rb"\x1b\[\d*m")
_ERASE_BELOW: Final = b"\x1b[J"
# To another line: up or down by a number of lines, to the beginning of a line above or below, to a place; or erasing.
_MOVE: Final = re.compile(rb"\x1b\[[\d;]*[ABEFHJ]")
_VERTICAL: Final = re.compile(rb"\n|\x1b\[(\d*)([ABEF])")


@dataclass(slots=True)
class TerminalLine:
    """The last line of a terminal.

    Attributes:
        text: What it shows; b"" if there is no such line.
        rank: The rank whose progress bar it is; None for a status, which any output replaces.
        owner: The output of that rank.
        is_drawn: The rank draws several lines.
        lines_above: How many of these are above the cursor.
    """

    text: bytes = b""
    rank: int | None = None
    owner: object = None
    is_drawn: bool = False
    lines_above: int = 0

    def show(self, text: bytes, rank: int | None = None, owner: object = None) -> bytes:
        """Return the bytes that show another text in this line; b"" if it has a bar of a lower rank."""
        if self.rank is not None and (rank is None or rank > self.rank):
            return b""
        erase = _ERASE if self.text else b""
        self.text, self.rank, self.owner = text, rank, owner
        return erase + text + b"\r"

    def clear(self) -> bytes:
        """Return the bytes that erase this line."""
        erase = _ERASE if self.text else b""
        self.text, self.rank, self.owner, self.is_drawn = b"", None, None, False
        return erase

    def draw(self, data: bytes, rank: int, owner: object) -> tuple[bytes, bytes]:
        """Show a part of what a rank draws in several lines.

        Returns:
            The bytes that show it, and the rest of the data: ordinary output, below these lines.
        """
        erase = b"" if self.owner is owner else self.clear()
        self.text, self.rank, self.owner, self.is_drawn = b"", rank, owner, True
        line = first = last = 0
        end = len(data)
        for move in _VERTICAL.finditer(data):
            count = int(move[1] or 1)
            if move[2] in {b"A", b"F"}:
                last = max(last, line)
                line -= count
                first = min(first, line)
                end = len(data)
            else:
                line += count
                if line > last:  # below all lines, unless the cursor goes up again
                    end = min(end, move.end())
        if moves_between_lines(data):
            self.lines_above = line - first
        if line > last or data.endswith(b"\n"):  # the last picture stays
            self.clear()
        return erase + data[:end], data[end:]

    def insert(self, lines: bytes) -> bytes:
        """Return the bytes that show output above this line."""
        if self.is_drawn:
            up, down = b"\x1b[A" * self.lines_above, b"\n" * self.lines_above
            return b"\r" + up + _ERASE_BELOW + lines.removesuffix(b"\n") + b"\n" + down
        if self.rank is None or not lines.endswith(b"\n"):
            return self.clear() + lines
        return _ERASE + lines + self.text + b"\r"


def moves_between_lines(data: bytes) -> bool:
    """Return whether output moves the cursor to another line than the next one."""
    return _MOVE.search(data) is not None


def last_state(line: bytes) -> bytes:
    """Return the text that a line shows after its carriage returns."""
    return next((part for part in reversed(line.rstrip(b"\n").split(b"\r")) if part), b"")


def visible_length(text: bytes) -> int:
    """Return the width of a text in ASCII, which may have colours."""
    return len(_COLOUR.sub(b"", text))


def fitted(prefix: bytes, text: bytes, descriptor: int) -> bytes:
    """Return a prefix and a text, which is cut to the width of a terminal, so that they take one line.

    A text with control sequences is not changed: its width is unknown.
    """
    try:
        columns = os.get_terminal_size(descriptor).columns
    except OSError:
        columns = 0
    if not columns or _ESCAPE in text:
        return prefix + text
    left = columns - visible_length(prefix) - 1
    return prefix + text.decode(errors="replace")[: max(1, left)].encode()
