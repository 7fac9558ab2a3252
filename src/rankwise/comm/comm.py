"""A comm: some ranks, and the primitive operations between them.

Checks, types and shapes are decided here, once; the transports (`SerialComm`, `TorchGroupComm`) only move bytes and
reduce. So a world of one raises what a world of many raises, and returns what it returns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

import torch

from rankwise.comm.buffers import as_bytes, from_bytes
from rankwise.comm.members import Members
from rankwise.comm.ops import Op, plan
from rankwise.errors import PayloadTypeError

# What travels with a frame.
INLINE_BYTES: Final = 4096


class Comm(Members):
    """Some ranks of a world, in an order, that can talk.

    Made by `rankwise.init()` and `rankwise.new_group()`; what `group=` takes. Results are new tensors, detached from
    autograd.

    Attributes:
        device: Where received tensors go that come from another rank's accelerator.
        check: Single tensors on an accelerator are checked too.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        global_rank: int,
        device: torch.device,
        control: torch.device,
        check: bool = False,
    ) -> None:
        super().__init__(ranks=ranks, global_rank=global_rank, control=control)
        self.device = device
        self.check = check

    def __repr__(self) -> str:
        place = "not a member" if self.rank is None else f"rank {self.rank}"
        return f"<{type(self).__name__} of {self.size} ranks, {place}>"

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        """Return the reduction of every member's tensor; all have the same shape and type, which they agreed on.

        Collective over the members.

        Raises:
            PayloadTypeError: The operation is not defined for the tensor's type or layout.
        """
        how = plan(tensor.dtype, op)
        wire = how.start(dense(tensor))
        self.reduce(wire, how.wire_op)
        return how.finish(wire, self.size)

    def reduce(self, wire: torch.Tensor, op: Op) -> None:
        """Reduce a contiguous tensor in place; its type is one that backends reduce with this operation."""
        if wire.is_complex() and op is Op.PRODUCT:  # no backend multiplies complex numbers
            wire.copy_(torch.stack(self.all_gather(wire)).prod(dim=0))
            return
        self._all_reduce(torch.view_as_real(wire) if wire.is_complex() else wire, op)

    def reduce_scatter(self, tensors: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
        """Return the reduction of every member's tensor for this rank; each passes one for each member.

        Collective over the members. The tensors are of one type, on one device.
        """
        me = self.require_member()
        sizes = [tensor.numel() for tensor in tensors]
        how = plan(tensors[0].dtype, op)
        flat = how.start(torch.cat([dense(tensor).reshape(-1) for tensor in tensors]))
        if len(set(sizes)) > 1 or flat.is_complex():
            # Pieces of different sizes, and complex products, are beyond what backends scatter.
            self.reduce(flat, how.wire_op)
            piece = flat.split(sizes)[me].clone()
        else:
            piece = self._reduce_scatter(flat.split(sizes), how.wire_op)
        return how.finish(piece, self.size).reshape(tensors[me].shape)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every member's tensor, in the members' order; all have the same shape and type.

        Collective over the members.
        """
        gathered = self._all_gather(as_bytes(tensor))
        return [from_bytes(part, tensor.dtype, tensor.shape) for part in gathered]

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        """Fill `data`, a flat uint8 tensor of the same length on every member, from the member at place `src`.

        Collective over the members.
        """
        if data.numel():
            self._broadcast(data, src)

    def transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """Send flat uint8 tensors to members, and fill others from members; places, not global ranks.

        Collective over the sender and receiver of each tensor. Empty ones do not travel.
        """
        outgoing = [(data, place) for data, place in outgoing if data.numel()]
        incoming = [(data, place) for data, place in incoming if data.numel()]
        if outgoing or incoming:
            self._transfer(outgoing, incoming)

    @abstractmethod
    def new_group(self, ranks: Sequence[int]) -> Comm:
        """Return a comm between some of the members.

        Collective over the members, chosen or not: all pass the same global ranks.
        """


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its gradient, in memory of its own values, if it is one that can be reduced.

    Raises:
        PayloadTypeError: It is sparse, quantized or has no contents.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise PayloadTypeError(f"only dense tensors can be reduced, got {tensor.layout} on {tensor.device}")
    return tensor.detach().resolve_conj().resolve_neg()
