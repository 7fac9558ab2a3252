"""Pipes: ring buffers in the memory of a group, one for each ordered pair of members, through which data moves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, TypeAlias

import torch

from rankwise._comm.buffers import memory_of
from rankwise._comm.control.flow import Flow
from rankwise._comm.control.page.layout import PIPE_HEADER_BYTES, PIPE_WORDS, pipe_bytes, pipe_start
from rankwise._comm.shared_memory import SharedRange
from rankwise._net.polling import SharedEventLoop

# What is copied at once: one end copies it out of the caches while the other end copies the next part in.
_CHUNK_BYTES: Final = 1 << 19

Tensors: TypeAlias = Mapping[int, torch.Tensor]


class PipeEnd:
    """This member's end of one pipe; `rest` is how many bytes of a transfer have not passed it."""

    # How a pipe works, and what makes it hard.
    #
    # Two processes use it at once, without a lock. The sender copies bytes in and then counts them in one word, which
    # it alone writes; the receiver copies them out and then counts them in another one. The difference is what the
    # receiver may read, and what the sender must not write over. A processor may do all this in another order. So there
    # is a fence before each copy: bytes are read, or written over, only after the look at the count of the other end.
    # And one after it: they are counted only when they are there, or have been read.
    #
    # A transfer begins at the start of the buffer, when the receiver has read all of the one before. That costs no
    # wait: between two calls the members agree, so only the second transfer of one call may find the pipe in use. And
    # short transfers use the same few bytes each time: little memory is allocated, and it stays in the caches.
    #
    # Both ends allocate what they will touch before the members agree on the call. To touch a hole in the file when no
    # memory is left, and be it to read, would end the process.
    #
    # A rank that is interrupted in a transfer may have copied bytes that it has not counted. Nobody has to repair that:
    # it leaves the group for good, and no other group gets this memory before all members have left.
    def __init__(self, memory: SharedRange, start: int, nbytes: int, *, sends: bool, fence: Callable[[], None]) -> None:
        own, other = PIPE_WORDS if sends else PIPE_WORDS[::-1]
        words = memory.words(start, PIPE_HEADER_BYTES // 8)
        self._own, self._other = words[own : own + 1], words[other : other + 1]
        self._memory, self._start = memory, start
        self._buffer = memory.address + start + PIPE_HEADER_BYTES
        self._capacity = nbytes - PIPE_HEADER_BYTES
        self._sends = sends
        self._fence = fence
        self._allocated = 0
        self._count = 0  # the bytes of all transfers that have passed this end
        self._data = self._moved = self.rest = 0

    def reserve(self, nbytes: int) -> None:
        """Allocate the memory for a transfer of this length."""
        wanted = PIPE_HEADER_BYTES + min(nbytes, self._capacity)
        if wanted > self._allocated:
            self._memory.allocate(self._start, wanted)
            self._allocated = wanted

    def begin(self, data: torch.Tensor) -> None:
        """Begin the transfer of a flat uint8 tensor, which must be kept until it is done."""
        self._data, self._moved, self.rest = data.data_ptr(), 0, data.numel()

    def ready(self) -> int:
        """Return how many bytes can be copied now, at once."""
        other = self._other[0]
        if not self._sends:
            ready = other - self._count
        elif self._moved or other == self._count:
            ready = self._capacity - (self._count - other)
        else:
            ready = 0  # the receiver still reads the transfer before
        return int(min(ready, self.rest, _CHUNK_BYTES, self._capacity - self._moved % self._capacity))

    def move(self) -> int:
        """Copy bytes if some can be copied, and return their number."""
        nbytes = self.ready()
        if nbytes:
            self._fence()
            own, shared = self._data + self._moved, self._buffer + self._moved % self._capacity
            if self._sends:
                ctypes.memmove(shared, own, nbytes)
            else:
                ctypes.memmove(own, shared, nbytes)
            self._fence()
            self._moved += nbytes
            self.rest -= nbytes
            self._count += nbytes
            self._own[0] = self._count
        return nbytes


class Pipes(Flow):
    """This member's ends of the pipes of a group, made when they are first used, and the transfer that runs."""

    def __init__(
        self,
        memory: SharedRange,
        ranks: Sequence[int],
        own: int,
        *,
        loop: SharedEventLoop,
        fence: Callable[[], None],
        wake: Callable[[Sequence[int]], None],
        sleep: Callable[[int, Callable[[], bool], Callable[[], float]], bool],
    ) -> None:
        """Use the memory of the pipes of a group; the other arguments are those of its `PageChannel`."""
        self._memory = memory
        self._ranks = ranks
        self._own = own
        self._loop = loop
        self._fence, self._wake, self._sleep = fence, wake, sleep
        self._ends: dict[tuple[int, int], PipeEnd] = {}
        self._pending: list[tuple[int, PipeEnd]] = []
        self._seen = 0

    def reserve(self, outgoing: Tensors, incoming: Tensors) -> Callable[[], Flow]:
        """Allocate memory for flat uint8 tensors to and from other members, and return what begins their transfer.

        Raises:
            CollectiveError: There is no memory.
            PayloadTypeError: A tensor has none.
        """
        ends = [(dst, self._end(self._own, dst), data) for dst, data in outgoing.items()]
        ends += [(src, self._end(src, self._own), data) for src, data in incoming.items()]
        for _, end, data in ends:
            memory_of(data)
            end.reserve(data.numel())

        def begin() -> Flow:
            for _, end, data in ends:
                end.begin(data)
            self._pending = [(member, end) for member, end, _ in ends]
            return self

        return begin

    @property
    def pending(self) -> AbstractSet[int]:
        return {self._ranks[member] for member, _ in self._pending}

    def step(self) -> int:
        self._seen = self._loop.num_events
        moved = 0
        for member, end in self._pending:
            if nbytes := end.move():
                moved += nbytes
                self._wake([member])
        if moved:
            self._pending = [(member, end) for member, end in self._pending if end.rest]
        return moved

    def wait(self, seconds: float) -> None:
        self._sleep(self._seen, lambda: any(end.ready() for _, end in self._pending), lambda: seconds)

    def _end(self, src: int, dst: int) -> PipeEnd:
        if (src, dst) not in self._ends:
            size = len(self._ranks)
            start, sends = pipe_start(size, src, dst), src == self._own
            self._ends[src, dst] = PipeEnd(self._memory, start, pipe_bytes(size), sends=sends, fence=self._fence)
        return self._ends[src, dst]
