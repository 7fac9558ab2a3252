"""A comm: some ranks, and the primitive operations between them.

Checks, types and shapes are decided here, once; the transports (`SerialComm`, `TorchGroupComm`) only move bytes and
reduce. So a world of one raises what a world of many raises, and returns what it returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import torch

from rankwise.comm.ops import Op, plan
from rankwise.errors import InvalidArgumentError, NotJoinedError, PayloadTypeError

# A short message travels in one frame: eight bytes of length, then the message.
_FRAME_BYTES: Final = 1024
_LENGTH_BYTES: Final = 8
_ROOM: Final = _FRAME_BYTES - _LENGTH_BYTES


class Comm(ABC):
    """Some ranks of a world, in an order, that can talk.

    Made by `rankwise.init()` and `rankwise.new_group()`; what `group=` takes. Results are new tensors, detached from
    autograd.

    Attributes:
        ranks: The members' global ranks. Their order is the order of gathered results.
        size: How many there are.
        rank: This process's place among the members, or None if it is not one.
        device: Where received tensors go that come from another rank's accelerator.
        control: The device that messages about values travel on.
        closed: The session that the members talked in is closed.
    """

    def __init__(self, *, ranks: Sequence[int], global_rank: int, device: torch.device, control: torch.device) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(global_rank) if global_rank in ranks else None
        self.device = device
        self.control = control
        self.closed = False

    def close(self) -> None:
        """Let go of what the members talked over."""
        self.closed = True

    def __repr__(self) -> str:
        place = "not a member" if self.rank is None else f"rank {self.rank}"
        return f"<{type(self).__name__} of {self.size} ranks, {place}>"

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        """Return the reduction of every member's tensor; all have the same shape and type.

        Collective over the members.

        Raises:
            PayloadTypeError: The operation is not defined for the tensor's type or layout.
        """
        self.require_member()
        wire, wire_op, finish = self._to_wire(tensor, op)
        if wire.is_complex() and wire_op is Op.PRODUCT:  # no backend multiplies complex numbers
            return finish(torch.stack(self.all_gather(wire)).prod(dim=0), self.size)
        self._all_reduce(torch.view_as_real(wire) if wire.is_complex() else wire, wire_op)
        return finish(wire, self.size)

    def reduce_scatter(self, tensors: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
        """Return the reduction of every member's tensor for this rank; each passes one for each member.

        Collective over the members.

        Raises:
            InvalidArgumentError: There is not one tensor for each member.
            PayloadTypeError: The operation is not defined for their type or layout, or their types differ.
        """
        me = self.require_member()
        if len(tensors) != self.size:
            raise InvalidArgumentError(
                f"reduce_scatter takes one tensor for each of {self.size} ranks, got {len(tensors)}"
            )
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
            raise PayloadTypeError("reduce_scatter takes tensors of one dtype on one device")
        sizes = [tensor.numel() for tensor in tensors]
        flat, wire_op, finish = self._to_wire(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), op)
        if len(set(sizes)) > 1 or flat.is_complex():
            # Pieces of different sizes, and complex products, are beyond what backends scatter.
            piece = self.all_reduce(flat, wire_op).split(sizes)[me].clone()
        else:
            piece = self._reduce_scatter(flat.split(sizes), wire_op)
        return finish(piece, self.size).reshape(tensors[me].shape)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every member's tensor, in the members' order; all have the same shape and type.

        Collective over the members.
        """
        self.require_member()
        data = as_bytes(tensor)
        gathered = self._all_gather(data)
        return [from_bytes(part, tensor.dtype, tensor.shape) for part in gathered]

    def exchange(self, message: bytes) -> list[bytes]:
        """Return every member's message, in the members' order; they may differ in length.

        Collective over the members. One round trip for short messages.
        """
        self.require_member()
        frames = [_open_frame(frame) for frame in self._all_gather(_frame(message).to(self.control))]
        longest = max(length for length, _ in frames)
        if longest <= _ROOM:
            return [data[:length] for length, data in frames]
        whole = self._all_gather(_tensor(message.ljust(longest, b"\0")).to(self.control))
        return [contents(data)[:length] for (length, _), data in zip(frames, whole, strict=True)]

    def announce(self, message: bytes, src: int) -> bytes:
        """Return the message of the member at place `src`; the others' are not looked at.

        Collective over the members. One trip for a short message.
        """
        self.require_member()
        frame = _frame(message).to(self.control)
        self._broadcast(frame, src)
        length, data = _open_frame(frame)
        if length <= _ROOM:
            return data[:length]
        whole = _tensor(message.ljust(length, b"\0")[:length]).to(self.control)
        self._broadcast(whole, src)
        return contents(whole)

    def deliver(self, messages: Sequence[bytes], src: int) -> bytes:
        """Return the message that the member at place `src` has for this one; the others' are not looked at.

        Collective over the members.
        """
        me = self.require_member()
        if me == src:
            others = [place for place in range(self.size) if place != me]
            self.transfer([(_length(messages[place]).to(self.control), place) for place in others], [])
            self.transfer([(_tensor(messages[place]).to(self.control), place) for place in others], [])
            return messages[me]
        length = _length(b"").to(self.control)
        self.transfer([], [(length, src)])
        data = torch.empty(int.from_bytes(contents(length), "little"), dtype=torch.uint8, device=self.control)
        self.transfer([], [(data, src)])
        return contents(data)

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        """Fill `data`, a flat uint8 tensor of the same length on every member, from the member at place `src`.

        Collective over the members.
        """
        self.require_member()
        if data.numel():
            self._broadcast(data, src)

    def transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """Send flat uint8 tensors to members, and fill others from members; places, not global ranks.

        Collective over the sender and receiver of each tensor. Empty ones do not travel.
        """
        self.require_member()
        self._transfer(
            [(data, place) for data, place in outgoing if data.numel()],
            [(data, place) for data, place in incoming if data.numel()],
        )

    def barrier(self) -> None:
        """Wait until every member is here.

        Collective over the members. Waits for the processes, not for work queued on their accelerators.
        """
        self.require_member()
        self._barrier()

    def place_of(self, global_rank: int, name: str) -> int:
        """Return a member's place, given its global rank.

        Raises:
            InvalidArgumentError: It is not a member; `name` names the argument in the message.
        """
        if isinstance(global_rank, bool) or not isinstance(global_rank, int) or global_rank not in self.ranks:
            shown = f"ranks 0 to {self.size - 1}" if isinstance(self.ranks, range) else f"ranks {list(self.ranks)}"
            raise InvalidArgumentError(f"{name}={global_rank!r} is not a member: the group has {shown}")
        return self.ranks.index(global_rank)

    def require_member(self) -> int:
        """Return this process's place among the members.

        Raises:
            NotJoinedError: The session that the members talked in is closed.
            InvalidArgumentError: It is not a member.
        """
        if self.closed:
            raise NotJoinedError("the session of this group is closed; call rankwise.init(), and make the group anew")
        if self.rank is None:
            raise InvalidArgumentError(f"this rank is not a member of the group of ranks {list(self.ranks)}")
        return self.rank

    @abstractmethod
    def new_group(self, ranks: Sequence[int]) -> Comm:
        """Return a comm between some of the members.

        Collective over the members, chosen or not: all pass the same global ranks.
        """

    def _to_wire(
        self, tensor: torch.Tensor, op: Op
    ) -> tuple[torch.Tensor, Op, Callable[[torch.Tensor, int], torch.Tensor]]:
        """Return a new dense tensor to reduce in place, and how."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise PayloadTypeError(f"only dense tensors can be reduced, got {tensor.layout} on {tensor.device}")
        how = plan(tensor.dtype, op)
        wire = torch.empty(tensor.shape, dtype=how.wire_dtype, device=tensor.device)
        wire.copy_(tensor.detach())
        return wire, how.wire_op, how.finish

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce a contiguous tensor in place."""

    @abstractmethod
    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
        """Return the reduction of this rank's piece, as a new tensor; all are flat and of one length."""

    @abstractmethod
    def _all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Gather flat uint8 tensors of one length, as new ones."""

    @abstractmethod
    def _broadcast(self, data: torch.Tensor, src: int) -> None: ...

    @abstractmethod
    def _transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> None: ...

    @abstractmethod
    def _barrier(self) -> None: ...


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the contents of a dense tensor as a flat uint8 tensor; no copy if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the dense tensor with these contents; no copy."""
    return data.view(dtype).reshape(tuple(shape))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def contents(tensor: torch.Tensor) -> bytes:
    """Return a flat uint8 tensor's contents."""
    data = bytearray(tensor.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return bytes(data)


def _length(message: bytes) -> torch.Tensor:
    return _tensor(len(message).to_bytes(_LENGTH_BYTES, "little"))


def _frame(message: bytes) -> torch.Tensor:
    return _tensor(len(message).to_bytes(_LENGTH_BYTES, "little") + message[:_ROOM].ljust(_ROOM, b"\0"))


def _open_frame(frame: torch.Tensor) -> tuple[int, bytes]:
    """Return the length of a frame's message, and as much of it as fits, padded."""
    data = contents(frame)
    return int.from_bytes(data[:_LENGTH_BYTES], "little"), data[_LENGTH_BYTES:]
