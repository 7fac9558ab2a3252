"""The variables of a process that has written a title over them, as setproctitle does, from the copy in its heap."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

# Ends of the names of variables that the ranks of a launcher have.
_OF_RANKS: Final = (b"RANK=", b"SLURM_PROCID=")
_NAME: Final = re.compile(rb"\w+=")
# More of a heap is not read, and so many strings that look like such a variable are tried.
_MOST: Final = 1 << 28
_TRIES: Final = 100
_POINTER: Final = 8


def moved_environ(pid: int) -> Mapping[str, str]:
    """Return the variables that a process has copied to its heap; none without a copy, or the right to read it."""
    try:
        heap = _Heap(pid)
    except (OSError, ValueError):
        return {}
    for position in itertools.islice(heap.variables(), _TRIES):
        pairs = [text.partition("=") for text in heap.neighbours(position)]
        if len(pairs) > 1:
            return {name: value for name, _equals, value in pairs}
    return {}


class _Heap:
    """The heap of a process, at one moment."""

    def __init__(self, pid: int) -> None:
        """Read it.

        Raises:
            OSError: The kernel does not let this process read it.
            ValueError: There is none.
        """
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        start, end = next((line.split()[0].split("-") for line in lines if line.endswith("[heap]")), ("0", "0"))
        self._start = int(start, 16)
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(self._start)
            self.data = memory.read(min(_MOST, int(end, 16) - self._start))

    def variables(self) -> Iterator[int]:
        """Give the positions of strings that may be such a variable."""
        for name in _OF_RANKS:
            found = self.data.find(name)
            while found >= 0:
                start = self.data.rfind(b"\0", 0, found) + 1
                if _NAME.fullmatch(self.data, start, found + len(name)):
                    yield start
                found = self.data.find(name, found + 1)

    def neighbours(self, position: int) -> list[str]:
        """Return the strings of the list of pointers in which that at a position is; none if it is in no list."""
        address = (self._start + position).to_bytes(_POINTER, sys.byteorder)
        place = self.data.find(address)
        while place >= 0 and place % _POINTER:
            place = self.data.find(address, place + 1)
        if place < 0:
            return []
        return [*self._strings(place, _POINTER), *self._strings(place - _POINTER, -_POINTER)]

    def _strings(self, place: int, step: int) -> Iterator[str]:
        """Give the variables that successive pointers point to, as far as they do."""
        while place >= 0:
            position = int.from_bytes(self.data[place : place + _POINTER], sys.byteorder) - self._start
            if not 0 < position < len(self.data):
                return
            text = self.data[position : self.data.find(b"\0", position)]
            if b"=" not in text:
                return
            yield os.fsdecode(text)
            place += step
