"""The data plane over the local connections of the session: on one host it is faster than gloo.

gloo passes each step from thread to thread and copies; a local connection takes hundreds of kilobytes in one call.
Between hosts the backend knows the network better, except for transfers between single ranks. See
docs/decisions/0008-frames-on-connections-of-their-own.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from rankwise._comm.buffers import as_bytes
from rankwise._comm.control.call import Move
from rankwise._comm.control.control import Control
from rankwise._comm.data.plane import DataPlane, Operation, Pieces, Support
from rankwise._comm.reduce_ops import Op, fold

# The size of the piece that each rank reduces at a time; it needs a buffer of this size for every other rank.
_PIECE_BYTES: Final = 1 << 20


class SocketPlane(DataPlane):
    """Moves tensors on the CPU over the connections between the members."""

    def __init__(self, control: Control, group_rank: int, *, is_only_plane: bool) -> None:
        """Use the connections of a group.

        Args:
            control: The control plane of the group, with the connections.
            group_rank: The group rank of this process.
            is_only_plane: The group has no other plane for everything, so tensors of other devices are staged.
        """
        self._control = control
        self._group_rank = group_rank
        self._size = control.size
        # Of the operations that are prepared together: they run one after the other.
        self._scratch: weakref.ref[torch.Tensor] | None = None
        self._others = [other for other in range(self._size) if other != group_rank]
        devices = None if is_only_plane else frozenset({"cpu"})
        self._on_one_host = Support(devices=devices)
        self._on_several_hosts = (
            self._on_one_host if is_only_plane else Support(frozenset({Operation.TRANSFER}), devices)
        )

    @property
    def support(self) -> Support:
        return self._on_one_host if self._control.same_host else self._on_several_hosts

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Move:
        # Every rank reduces one piece, and sends it to all others.
        wire = tensor.view(-1)
        size = self._size
        step = min(_PIECE_BYTES // wire.element_size(), -(-wire.numel() // size))
        nbytes = size * step * wire.element_size()
        scratch = self._shared_scratch(nbytes)

        def run() -> None:
            buffers = scratch[:nbytes].view(wire.dtype).view(size, step)
            for segment in wire.split(step * size):
                pieces = list(segment.split(step))
                pieces += [segment[:0]] * (size - len(pieces))
                own = pieces[self._group_rank]
                own.copy_(self._reduced(pieces, op, buffers))
                self._move(dict.fromkeys(self._others, own), {other: pieces[other] for other in self._others})

        return run

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: Op) -> Move:
        buffers = torch.empty(len(self._others), pieces[0].numel(), dtype=pieces[0].dtype, device="cpu")

        def run() -> None:
            self._reduced(pieces, op, [*buffers, out])

        return run

    def _all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Move:
        gathered[self._group_rank].copy_(data)
        incoming = {other: gathered[other] for other in self._others}
        return lambda: self._move(dict.fromkeys(self._others, data), incoming)

    def _broadcast(self, data: torch.Tensor, src: int) -> Move:
        if self._group_rank == src:
            return lambda: self._move(dict.fromkeys(self._others, data), {})
        return lambda: self._move({}, {src: data})

    def _transfer(self, outgoing: Pieces, incoming: Pieces) -> Move:
        return self._control.transfer({dst: data for data, dst in outgoing}, {src: data for data, src in incoming})

    def _shared_scratch(self, nbytes: int) -> torch.Tensor:
        """Return memory of at least so many bytes, which is free when the last operation that has it has run."""
        scratch = None if self._scratch is None else self._scratch()
        if scratch is None or scratch.numel() < nbytes:
            scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._scratch = weakref.ref(scratch)
        return scratch

    def _reduced(self, pieces: Sequence[torch.Tensor], op: Op, buffers: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the reduction of this rank's piece, in rank order, so that the result is the same in every run.

        `buffers` has a row for each other rank's piece, and one for the result.
        """
        own = pieces[self._group_rank]
        *rows, result = (row[: own.numel()] for row in buffers)
        received = dict(zip(self._others, rows, strict=True))
        self._move({other: pieces[other] for other in self._others}, received)
        return fold([received.get(group_rank, own) for group_rank in range(len(pieces))], op, out=result)

    def _move(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        self._control.transfer(
            {other: as_bytes(data) for other, data in outgoing.items() if data.numel()},
            {other: as_bytes(data) for other, data in incoming.items() if data.numel()},
        )()
