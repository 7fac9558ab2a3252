"""Data operations between ranks of one host, over local connections: faster than gloo on one host.

gloo passes each step from thread to thread and copies; a local connection takes hundreds of kilobytes in one call.
Between hosts the backend knows the network better. See docs/decisions/0008-frames-on-connections-of-their-own.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from rankwise._comm.buffers import as_bytes, memory_of
from rankwise._comm.control.agreement import Prepared
from rankwise._comm.control.channel import Channel
from rankwise._comm.reduce_ops import Op, fold

# The size of the piece that each rank reduces at a time; it needs a buffer of this size for every other rank.
_PIECE_BYTES: Final = 1 << 20


class LocalTransport:
    """Data operations on contiguous CPU tensors between members that are all on this host."""

    def __init__(self, channel: Channel, group_rank: int, *, timeout: float) -> None:
        self._channel = channel
        self._group_rank = group_rank
        self._others = [other for other in range(len(channel.ranks)) if other != group_rank]
        self._timeout = timeout

    def all_reduce(self, wire: torch.Tensor, op: Op) -> Prepared[None]:
        """Prepare to reduce a flat tensor in place: every rank reduces one piece, and sends it to all others."""
        size = len(self._channel.ranks)
        step = min(_PIECE_BYTES // wire.element_size(), -(-wire.numel() // size))
        buffers = torch.empty(size, step, dtype=wire.dtype, device="cpu")

        def run() -> None:
            for segment in wire.split(step * size):
                pieces = list(segment.split(step))
                pieces += [segment[:0]] * (size - len(pieces))
                own = pieces[self._group_rank]
                own.copy_(self._reduced(pieces, op, buffers))
                self._transfer(dict.fromkeys(self._others, own), {other: pieces[other] for other in self._others})

        return run

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> Prepared[torch.Tensor]:
        """Prepare the reduction of this rank's piece, as a new tensor; all pieces are flat and have one length."""
        buffers = torch.empty(len(self._others), pieces[0].numel(), dtype=pieces[0].dtype, device="cpu")
        result = torch.empty_like(pieces[0])
        return lambda: self._reduced(pieces, op, [*buffers, result])

    def all_gather(self, data: torch.Tensor) -> Prepared[list[torch.Tensor]]:
        """Prepare to gather the members' tensors, by group rank; all have one length."""
        gathered = [torch.empty_like(data) for _ in self._channel.ranks]
        gathered[self._group_rank].copy_(data)

        def run() -> list[torch.Tensor]:
            self._transfer(dict.fromkeys(self._others, data), {other: gathered[other] for other in self._others})
            return gathered

        return run

    def broadcast(self, data: torch.Tensor, src: int) -> Prepared[None]:
        """Prepare to fill a tensor from group rank `src`."""
        if self._group_rank == src:
            return lambda: self._transfer(dict.fromkeys(self._others, data), {})
        return lambda: self._transfer({}, {src: data})

    def _reduced(self, pieces: Sequence[torch.Tensor], op: Op, buffers: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the reduction of this rank's piece, in rank order, so that the result is the same in every run.

        `buffers` has a row for each other rank's piece, and one for the result.
        """
        own = pieces[self._group_rank]
        *rows, result = (row[: own.numel()] for row in buffers)
        received = dict(zip(self._others, rows, strict=True))
        self._transfer({other: pieces[other] for other in self._others}, received)
        return fold([received.get(group_rank, own) for group_rank in range(len(pieces))], op, out=result)

    def _transfer(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        self._channel.transfer(
            {other: memory_of(as_bytes(data)) for other, data in outgoing.items() if data.numel()},
            {other: memory_of(as_bytes(data)) for other, data in incoming.items() if data.numel()},
            timeout=self._timeout,
        )
