"""The pipes that ranks print to, as their launcher reads them: not faster than what they print can be shown."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable
from io import RawIOBase
from typing import TextIO

from rankwise._launch.forkserver.ipc import PIECE_BYTES
from rankwise._launch.output import Console, Lines


class OutputPipes:
    """The pipes of all ranks, in the loop that waits for everything."""

    def __init__(self, selector: selectors.BaseSelector, screen: Console) -> None:
        self._selector = selector
        self._screen = screen
        self._pipes: set[RawIOBase] = set()
        self._held_back: dict[RawIOBase, Callable[[int], None]] = {}
        self._takes_all = False
        self._room, self._makes_room = socket.socketpair()
        self._room.setblocking(False)
        self._makes_room.setblocking(False)
        selector.register(self._room, selectors.EVENT_READ, self._hear_of_room)
        screen.has_room = self._wake_up

    @property
    def are_open(self) -> bool:
        """Some process may print still."""
        return bool(self._pipes)

    @property
    def are_held_back(self) -> bool:
        """Some pipe is not read for now: the rest of a line may be in it."""
        return bool(self._held_back)

    def open(self, number: int, stream: TextIO | None) -> tuple[int, Lines]:
        """Return what a rank writes to, and what shows it."""
        lines = self._screen.open(number, stream)
        direct = self._screen.direct(stream)
        if direct is not None:
            return os.dup(direct), lines
        return self.pipe(lines.add, lambda: lines.is_held_back), lines

    def pipe(self, take: Callable[[bytes], object], is_held_back: Callable[[], bool] = lambda: False) -> int:
        """Return the end of a new pipe that a rank writes to.

        Args:
            take: Takes what the rank writes, until it returns False.
            is_held_back: Returns whether to stop reading for now, so that the rank waits when its pipe is full.
        """
        reader, writer = os.pipe()
        pipe = os.fdopen(reader, "rb", buffering=0)
        self._pipes.add(pipe)

        def read(_: int) -> None:
            if pipe.closed or pipe in self._held_back:
                return  # since this was seen
            data = pipe.read(PIECE_BYTES)
            if not data or take(data) is False:  # closed, so that the rank learns that nobody reads it
                self._close(pipe)
            elif is_held_back() and not self._takes_all:
                self._selector.unregister(pipe)
                self._held_back[pipe] = read

        self._selector.register(pipe, selectors.EVENT_READ, read)
        return writer

    def take_all(self) -> None:
        """Read what is in the pipes, though it cannot be shown yet: those who wrote to them are gone."""
        self._takes_all = True
        self._read_on()

    def let_go(self) -> None:
        """Close all pipes; new ones may follow."""
        for pipe in list(self._pipes):
            self._close(pipe)
        self._takes_all = False

    def close(self) -> None:
        """End."""
        self._screen.has_room = lambda: None
        self._room.close()
        self._makes_room.close()

    def _close(self, pipe: RawIOBase) -> None:
        if self._held_back.pop(pipe, None) is None:
            self._selector.unregister(pipe)
        self._pipes.discard(pipe)
        pipe.close()

    def _read_on(self) -> None:
        while self._held_back:
            pipe, read = self._held_back.popitem()
            self._selector.register(pipe, selectors.EVENT_READ, read)

    def _wake_up(self) -> None:
        """Let the loop read on: called by a thread, perhaps after this was closed."""
        with contextlib.suppress(OSError):
            self._makes_room.send(b"\0")

    def _hear_of_room(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._room.recv(PIECE_BYTES)
        self._read_on()
