"""The interface of a data plane, which moves and reduces the tensors of a group.

A group has one or more. A data plane declares in a `Support` the operations, devices and types that it supports; for
each operation the group uses the first plane that supports it. An operation has two steps: it is prepared, which
allocates memory and may fail on one rank, and after all ranks have agreed it is run, which only sends and receives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

import torch

from rankwise._backends import opened_accelerator
from rankwise._comm.control.call import Move
from rankwise._comm.reduce_ops import Op

# Tensors with the group ranks that they are sent to, or received from.
Pieces: TypeAlias = Sequence[tuple[torch.Tensor, int]]


class Operation(Enum):
    """An operation of a data plane."""

    ALL_REDUCE = auto()
    REDUCE_SCATTER = auto()
    ALL_GATHER = auto()
    BROADCAST = auto()
    TRANSFER = auto()


ALL_OPERATIONS: Final = frozenset(Operation)
# The types in which the wire formats of reductions are (see `reduce_ops.plan`), without complex ones.
REAL_DTYPES: Final = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)


# torch rounds pinned memory up to a power of two, and never returns it to the host.
_MOST_PINNED_BYTES: Final = 1 << 28


@dataclass(frozen=True, slots=True)
class Support:
    """The operations, devices and types that a data plane supports.

    Attributes:
        operations: The operations.
        devices: The types of the devices whose tensors it moves; None for all.
        dtypes: The types that it reduces.
    """

    operations: frozenset[Operation] = ALL_OPERATIONS
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] = REAL_DTYPES

    def covers(self, operation: Operation, device: torch.device) -> bool:
        """Return whether an operation on tensors of a device is supported."""
        return operation in self.operations and (self.devices is None or device.type in self.devices)


class DataPlane(ABC):
    """Moves and reduces the tensors of one group: contiguous ones, without gradients.

    Tensors of a device that the plane does not move itself are staged: copied to a device of its own, and back.

    Attributes:
        support: The operations that it supports now.
        staging_device: The device to which tensors of devices that it does not move are copied.
        backend: The backends of the group, as torch writes them; None without a process group.
    """

    backend: str | None = None
    staging_device: torch.device = torch.device("cpu")

    @property
    @abstractmethod
    def support(self) -> Support: ...

    def covers(self, operation: Operation, device: torch.device) -> bool:
        """Return whether an operation on tensors of a device is supported now."""
        return self.support.covers(operation, device)

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release everything that belongs to the group."""

    def moves(self, device: torch.device) -> bool:
        """Return whether it moves tensors of a device as they are, without staging."""
        return device.type == "cpu"

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on a device whose tensors the plane moves: the tensor itself if possible."""
        return tensor if self.moves(tensor.device) else self._empty(tensor).copy_(tensor)

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> Move:
        """Prepare to reduce a tensor in place."""
        staged = self.stage(tensor)
        return _and_copy_back(self._all_reduce(staged, op), [(staged, tensor)])

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: Op) -> Move:
        """Prepare the reduction of this rank's piece into `out`; all pieces are flat and have one length."""
        staged = self.stage(out)
        return _and_copy_back(
            self._reduce_scatter([self.stage(piece) for piece in pieces], staged, op), [(staged, out)]
        )

    def all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Move:
        """Prepare to fill tensors from all members, by group rank; all are flat uint8 tensors of one length."""
        received = [part if self.moves(part.device) else self._empty(part) for part in gathered]
        return _and_copy_back(self._all_gather(self.stage(data), received), list(zip(received, gathered, strict=True)))

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor, on a device whose tensors the plane moves."""
        is_on_cpu = self.staging_device.type == "cpu"
        return empty_on_cpu(tensor) if is_on_cpu else torch.empty_like(tensor, device=self.staging_device)

    def broadcast(self, data: torch.Tensor, src: int) -> Move:
        """Prepare to fill a flat uint8 tensor from group rank `src`."""
        staged = self.stage(data)
        return _and_copy_back(self._broadcast(staged, src), [(staged, data)])

    def transfer(self, outgoing: Pieces, incoming: Pieces) -> Move:
        """Prepare to send flat uint8 tensors to group ranks, and to fill others from group ranks; none is empty."""
        sent = [(self.stage(data), dst) for data, dst in outgoing]
        received = [(self.stage(data), src) for data, src in incoming]
        copies = [(staged, data) for (staged, _), (data, _) in zip(received, incoming, strict=True)]
        return _and_copy_back(self._transfer(sent, received), copies)

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Move: ...

    @abstractmethod
    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: Op) -> Move: ...

    @abstractmethod
    def _all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Move: ...

    @abstractmethod
    def _broadcast(self, data: torch.Tensor, src: int) -> Move: ...

    @abstractmethod
    def _transfer(self, outgoing: Pieces, incoming: Pieces) -> Move: ...


def empty_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return contiguous memory on the CPU for a tensor of a device: memory that its driver copies to and from directly.

    Such memory is kept by torch for the next time. So large tensors get none, nor tensors where it cannot be had.
    """
    opened = opened_accelerator()
    if opened is not None and opened.type == tensor.device.type and tensor.nbytes <= _MOST_PINNED_BYTES:
        with suppress(RuntimeError):  # the host has locked as much memory as it may
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _and_copy_back(run: Move, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Move:
    """Return an operation that also copies staged tensors back."""
    if all(staged is original for staged, original in copies):
        return run

    def run_and_copy() -> None:
        run()
        for staged, original in copies:
            if staged is not original:
                original.copy_(staged)

    return run_and_copy
