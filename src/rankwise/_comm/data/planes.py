"""The operations of a group on tensors, through its data planes.

Checks, types and shapes are handled here, once; a data plane only moves tensors and reduces them. So a world of one
has the same errors and results as a larger world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rankwise._comm.buffers import as_bytes, from_bytes
from rankwise._comm.control.call import Move
from rankwise._comm.data.plane import DataPlane, Operation
from rankwise._comm.data.shared_memory_plane import SharedMemoryPlane
from rankwise._comm.dense_tensors import dense
from rankwise._comm.reduce_ops import Op, ReductionRecipe, fold, plan
from rankwise.errors import PayloadTypeError


@dataclass(frozen=True, slots=True)
class TensorReduction:
    """A prepared reduction of tensors.

    Attributes:
        run: Moves and reduces the data, once the members agree.
        finish: Returns the result, after the call: it allocates memory, and no other waits for this one any more.
    """

    run: Move
    finish: Callable[[], torch.Tensor]


class Planes:
    """The data planes of a group, and its operations on tensors.

    Each operation is prepared before the members agree on a call, and run afterwards.

    Attributes:
        planes: The data planes, in the order in which they are tried for an operation. The last one supports all.
        size: The number of members.
        own: The group rank of this process; -1 if it is not a member, and makes none of the operations.
    """

    def __init__(self, planes: Sequence[DataPlane], size: int, rank: int | None) -> None:
        """Make the operations of a group.

        Args:
            planes: The data planes.
            size: The number of members.
            rank: The group rank of this process; None if it is not a member.
        """
        self.planes = planes
        self.size = size
        self.own = -1 if rank is None else rank

    @property
    def backend(self) -> str | None:
        """The backends of the group, as torch writes them; None alone, and if this rank is not a member."""
        return self.planes[-1].backend

    def close(self) -> None:
        """Release everything that belongs to the group."""
        for plane in self.planes:
            plane.close()

    @property
    def shared_memory(self) -> SharedMemoryPlane | None:
        """The data plane through memory of the host; None if the members do not use it, or are not connected yet."""
        found = (plane for plane in self.planes if isinstance(plane, SharedMemoryPlane) and plane.is_available)
        return next(found, None)

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> TensorReduction:
        """Prepare the reduction of the members' tensors, which have the same shape and type.

        Raises:
            PayloadTypeError: The operation is not defined for the tensor's type or layout.
        """
        recipe = plan(tensor.dtype, op)
        wire = recipe.start(dense(tensor))
        return TensorReduction(
            self.reduce(wire, op), lambda: recipe.finish(wire, self.size).reshape(tensor.shape).to(tensor.device)
        )

    def reduce(self, wire: torch.Tensor, op: Op) -> Move:
        """Prepare to reduce a contiguous tensor in place, in the wire format of the operation.

        What no data plane reduces is gathered, and reduced by every member.
        """
        if wire.is_complex() and op.is_linear:
            wire = torch.view_as_real(wire)
        device = self._device_of_messages(wire.device)
        for plane in self.planes:
            if wire.dtype in plane.support.dtypes and plane.covers(Operation.ALL_REDUCE, device):
                return plane.all_reduce(wire, op)
        return self._reduce_gathered(wire, op)

    def _reduce_gathered(self, wire: torch.Tensor, op: Op) -> Move:
        data = as_bytes(wire)
        parts = [torch.empty_like(data) for _ in range(self.size)]
        gather = self.all_gather_into(data, parts)

        def run() -> None:
            gather()
            fold([from_bytes(part, wire.dtype, wire.shape).to(wire.device) for part in parts], op, out=wire)

        return run

    def reduce_scatter(self, tensors: Sequence[torch.Tensor], op: Op) -> TensorReduction:
        """Prepare the reduction of the members' tensors for this rank; each member passes a tensor for each member.

        The tensors have one type and one device.
        """
        own = self.own
        recipe = plan(tensors[0].dtype, op)
        wires = [_read_only_wire(dense(tensor), recipe, op) for tensor in tensors]
        sizes = [wire.numel() for wire in wires]
        shape, device = tensors[own].shape, tensors[own].device
        plane = self._plane(Operation.REDUCE_SCATTER, wires[0].device)
        if len(set(sizes)) == 1 and wires[0].dtype in plane.support.dtypes:
            piece = torch.empty_like(wires[0])
            run = plane.reduce_scatter(wires, piece, op)
            return TensorReduction(run, lambda: recipe.finish(piece, self.size).reshape(shape).to(device))
        # No data plane scatters pieces of different sizes.
        flat = torch.cat(wires)
        return TensorReduction(
            self.reduce(flat, op),
            lambda: recipe.finish(flat.split(sizes)[own].clone(), self.size).reshape(shape).to(device),
        )

    def all_gather_into(self, data: torch.Tensor, parts: Sequence[torch.Tensor]) -> Move:
        """Prepare to fill flat uint8 tensors of one length from all members, by group rank."""
        return self._plane(Operation.ALL_GATHER, data.device).all_gather(data, parts)

    def all_gather_ragged(self, data: torch.Tensor, parts: Sequence[torch.Tensor], device: str) -> Move:
        """Prepare to fill flat uint8 tensors of different lengths from all members, by group rank.

        `device` is the type of device of all that is sent; members that send nothing may have no such device.
        """
        if self._device_of_messages(torch.device(device)).type == "cpu" and self.shared_memory is not None:
            return self.shared_memory.all_gather(data, parts)
        # Padded to the largest one, as torch's all_gather needs them, every transfer would be as long as that.
        others = [other for other in range(self.size) if other != self.own]
        parts[self.own].copy_(data)
        return self.transfer([(data, other) for other in others], [(parts[other], other) for other in others])

    def broadcast(self, data: torch.Tensor, src: int) -> Move:
        """Prepare to fill `data`, a flat uint8 tensor of one length on all members, from group rank `src`."""
        return self._plane(Operation.BROADCAST, data.device).broadcast(data, src) if data.numel() else _do_nothing

    def transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Move:
        """Prepare to send flat uint8 tensors to group ranks, and to fill others from group ranks.

        Empty tensors are not sent.
        """
        outgoing = [(data, dst) for data, dst in outgoing if data.numel()]
        incoming = [(data, src) for data, src in incoming if data.numel()]
        pieces = [*outgoing, *incoming]
        if not pieces:
            return _do_nothing
        device = pieces[0][0].device
        return self._plane(Operation.TRANSFER, device).transfer(outgoing, incoming)

    def all_to_all(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Move:
        """Prepare to send a flat uint8 tensor to each other member, and to fill one from each, by group rank.

        Those at this rank's index are neither sent nor filled.
        """
        others = [other for other in range(self.size) if other != self.own]
        return self.transfer(
            [(outgoing[other], other) for other in others], [(incoming[other], other) for other in others]
        )

    def _plane(self, operation: Operation, device: torch.device) -> DataPlane:
        """Return the first data plane that supports an operation on tensors of a device.

        Raises:
            PayloadTypeError: None does.
        """
        for moved in (self._device_of_messages(device), torch.device("cpu")):
            for plane in self.planes:
                if plane.covers(operation, moved):
                    return plane
        name = operation.name.lower()
        raise PayloadTypeError(f"{name} of tensors on {device.type} is not supported in this group")

    # All members take one plane, also where only some of them have tensors of a device, and the others receive on the
    # CPU. So a device without a plane of its own in the group counts as the CPU, on every member.
    def _device_of_messages(self, device: torch.device) -> torch.device:
        """Return the device on which tensors of a device are moved."""
        return device if any(plane.moves(device) for plane in self.planes) else torch.device("cpu")


def _read_only_wire(tensor: torch.Tensor, recipe: ReductionRecipe, op: Op) -> torch.Tensor:
    """Return a dense tensor in wire format and flat, to be read only: its own memory if it has that format."""
    has_format = recipe.wire_dtype is tensor.dtype and not (op.is_mean and tensor.dtype is torch.int64)
    if has_format and tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor.view(-1)
    return recipe.start(tensor).reshape(-1)


def all_of(moves: Sequence[Move]) -> Move:
    """Return one operation that runs several."""

    def run() -> None:
        for move in moves:
            move()

    return run


def _do_nothing() -> None:
    """Transfer no data."""
