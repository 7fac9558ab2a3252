"""Data between ranks of one host, over the connections between them: faster there than over gloo's.

gloo hands each step from thread to thread, and copies; a connection of this host takes hundreds of kilobytes in one
call. Between hosts the backend knows the network better. See docs/decisions/0008-frames-on-connections-of-their-own.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from rankwise._comm.buffers import as_bytes, memory_of
from rankwise._comm.control.agreement import Prepared
from rankwise._comm.control.mesh import Mesh
from rankwise._comm.reduce_ops import Op, fold

# How much of a tensor each rank reduces at a time; it needs that much memory for every other rank.
_PIECE_BYTES: Final = 1 << 20


class LocalTransport:
    """Operations between the members of a group that are all on this host, on contiguous tensors of the CPU."""

    def __init__(self, mesh: Mesh, place: int, *, timeout: float) -> None:
        self._mesh = mesh
        self._me = place
        self._others = [other for other in range(len(mesh.ranks)) if other != place]
        self._timeout = timeout

    def all_reduce(self, wire: torch.Tensor, op: Op) -> Prepared[None]:
        """Prepare to reduce a flat tensor in place: every rank reduces a piece, and gives it to all."""
        size = len(self._mesh.ranks)
        step = min(_PIECE_BYTES // wire.element_size(), -(-wire.numel() // size))
        room = torch.empty(size, step, dtype=wire.dtype, device="cpu")

        def run() -> None:
            for segment in wire.split(step * size):
                pieces = list(segment.split(step))
                pieces += [segment[:0]] * (size - len(pieces))
                mine = pieces[self._me]
                mine.copy_(self._reduced(pieces, op, room))
                self._transfer(dict.fromkeys(self._others, mine), {other: pieces[other] for other in self._others})

        return run

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> Prepared[torch.Tensor]:
        """Prepare the reduction of this rank's piece, as a new tensor; all are flat and of one length."""
        room = torch.empty(len(self._others), pieces[0].numel(), dtype=pieces[0].dtype, device="cpu")
        result = torch.empty_like(pieces[0])
        return lambda: self._reduced(pieces, op, [*room, result])

    def all_gather(self, data: torch.Tensor) -> Prepared[list[torch.Tensor]]:
        """Prepare to gather every member's tensor, by place; all are of one length."""
        gathered = [torch.empty_like(data) for _ in self._mesh.ranks]
        gathered[self._me].copy_(data)

        def run() -> list[torch.Tensor]:
            self._transfer(dict.fromkeys(self._others, data), {other: gathered[other] for other in self._others})
            return gathered

        return run

    def broadcast(self, data: torch.Tensor, src: int) -> Prepared[None]:
        """Prepare to fill a tensor from the member at place `src`."""
        if self._me == src:
            return lambda: self._transfer(dict.fromkeys(self._others, data), {})
        return lambda: self._transfer({}, {src: data})

    def _reduced(self, pieces: Sequence[torch.Tensor], op: Op, room: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the reduction of this rank's piece, in the order of ranks, so that it is the same in every run.

        `room` has a row for each other rank's piece, and one for the result.
        """
        mine = pieces[self._me]
        *rows, result = (row[: mine.numel()] for row in room)
        theirs = dict(zip(self._others, rows, strict=True))
        self._transfer({other: pieces[other] for other in self._others}, theirs)
        return fold([theirs.get(place, mine) for place in range(len(pieces))], op, out=result)

    def _transfer(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        self._mesh.transfer(
            {place: memory_of(as_bytes(data)) for place, data in outgoing.items() if data.numel()},
            {place: memory_of(as_bytes(data)) for place, data in incoming.items() if data.numel()},
            timeout=self._timeout,
        )
