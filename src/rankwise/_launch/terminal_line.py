"""The last line of a terminal, which is replaced in place: a status of the launcher, or a rank's progress bar.

Other output is shown above it. Only the bar of one rank, the lowest, is shown: a bar ends with a carriage return in
place of a line feed, and several of them would overwrite each other.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

_ERASE: Final = b"\x1b[2K"
_ESCAPE: Final = b"\x1b"
_COLOUR: Final = re.compile(rb"\x1b\[\d*m")


@dataclass(slots=True)
class TerminalLine:
    """The last line of a terminal.

    Attributes:
        text: What it shows; b"" if there is no such line.
        rank: The rank whose progress bar it is; None for a status, which any output replaces.
        owner: The output of that rank.
    """

    text: bytes = b""
    rank: int | None = None
    owner: object = None

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
        self.text, self.rank, self.owner = b"", None, None
        return erase

    def insert(self, lines: bytes) -> bytes:
        """Return the bytes that show output above this line."""
        if self.rank is None or not lines.endswith(b"\n"):
            return self.clear() + lines
        return _ERASE + lines + self.text + b"\r"


def last_state(line: bytes) -> bytes:
    """Return the text that a line shows after its carriage returns."""
    return next((part for part in reversed(line.rstrip(b"\n").split(b"\r")) if part), b"")


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
    left = columns - len(_COLOUR.sub(b"", prefix)) - 1
    return prefix + text.decode(errors="replace")[: max(1, left)].encode()
