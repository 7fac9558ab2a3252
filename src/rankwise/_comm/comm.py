"""Comm: a group of ranks, and the primitive operations between them.

Checks, types and shapes are handled here, once; the data planes only move tensors and reduce them. So a world of one
has the same errors and results as a larger world.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch.distributed import Store
from torch.nn.parameter import is_lazy

from rankwise._comm.buffers import as_bytes, from_bytes, require_memory
from rankwise._comm.control.byte_collectives import ByteCollectives
from rankwise._comm.control.protocol import Call
from rankwise._comm.control.transports import Completion, FrameExchange, Prepared
from rankwise._comm.data.plane import DataPlane, Operation
from rankwise._comm.group_rank import GroupRank
from rankwise._comm.reduce_ops import Op, fold, plan
from rankwise._comm.work import Work
from rankwise._comm.work_queue import WorkQueue
from rankwise._torch import without_class
from rankwise._user_frames import call_site
from rankwise.errors import CollectiveError, InvalidArgumentError, PayloadTypeError

T = TypeVar("T")

# The largest data that is sent in the body of a frame, without a data operation.
INLINE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """The functions of a session that a group of it needs.

    Attributes:
        open_group: Returns a group of some of the members; Collective over all members.
        open_pair: Returns the group of two members, given their group ranks in ascending order; Local. None if there is
            no other member.
        store: Returns the store that the members share; None if there is no other member.
        destroy: Destroys the process group that was created for the group, if there is one.
        close_unreferenced: Closes the groups of the session to which nothing refers any more.
        timeout: Seconds that a collective waits for a rank; None without a limit.
    """

    open_group: Callable[[Sequence[int]], Comm]
    open_pair: Callable[[Sequence[int]], Comm] | None = None
    store: Callable[[], Store] | None = None
    destroy: Callable[[], None] = lambda: None
    close_unreferenced: Callable[[], None] = lambda: None
    timeout: float | None = None


class Comm(ByteCollectives):
    """A group of ranks, in an order, that can communicate.

    Users have it as a `Group`. Results are new tensors, detached from autograd.

    Attributes:
        device: The device of received tensors that were on another rank's accelerator.
        check: Single tensors on an accelerator are verified too.
        planes: The data planes, in the order in which they are tried for an operation. The last one supports all.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        global_rank: int,
        device: torch.device,
        planes: Sequence[DataPlane],
        exchange: FrameExchange | None = None,
        context: GroupContext,
        check: bool = False,
    ) -> None:
        """Make the group of some ranks.

        Args:
            ranks: The global ranks of the members.
            global_rank: The global rank of this process.
            device: The device of received tensors that were on another rank's accelerator.
            planes: The data planes.
            exchange: The exchange of frames; None if the group does not use frames, or has one member.
            context: The functions of the session.
            check: Single tensors on an accelerator are verified too.
        """
        super().__init__(ranks=ranks, global_rank=global_rank, exchange=exchange, transport=planes[-1])
        self.device = device
        self.check = check
        self.planes = planes
        self._context = context
        self._pairs: dict[int, Comm] = {}

    @property
    def backend(self) -> str | None:
        """The backends of the group, as torch writes them; None alone, and if this rank is not a member."""
        return self.planes[-1].backend

    @property
    def control_device(self) -> torch.device:
        """The device of short messages, in groups that do not use frames."""
        return self.planes[-1].message_device

    def shared_store(self) -> Store | None:
        """Return the store that the members share; None if there is no other member."""
        return None if self._context.store is None else self._context.store()

    def shutdown(self, reason: str) -> None:
        super().shutdown(reason)
        for plane in self.planes:
            plane.close()

    def close_locally(self, reason: str) -> None:
        self.finish_works(0)
        super().close_locally(reason)
        self._context.destroy()

    def new_group(self, ranks: Sequence[int]) -> Comm:
        """Return a new group of some of the members.

        Collective over all members of this group, which pass the same global ranks.
        """
        child = self._context.open_group(ranks)
        self.add_child(child)
        return child

    def pair(self, other: int) -> Comm:
        """Return the group of this member and another one, made by the first call. Local.

        Args:
            other: The group rank of the other member.

        Raises:
            InvalidArgumentError: It is this member itself.
            CollectiveError: The ranks of the session are not connected yet.
        """
        own = self.require_member()
        if other == own or self._context.open_pair is None:
            raise InvalidArgumentError(f"rank {self.ranks[own]} cannot send to itself, or receive from itself")
        if other not in self._pairs:
            pair = self._pairs[other] = self._context.open_pair(sorted((own, other)))
            self.add_child(pair)
        return self._pairs[other]

    def close(self) -> None:
        """Close a group that users have made, as `Group.close` describes.

        Collective over the members; Local on other ranks, and in a closed group.
        """
        if self.closed or self._pid != os.getpid():
            return
        call = Call("close")
        try:
            if self.rank is not None and not self._broken_reason:
                with self.collective(call):
                    self.verify(call)
        except CollectiveError:
            if self.dead_ranks():  # the members will never agree
                self.close_locally("closed the group")
            raise
        self.close_locally("closed the group")

    def leave(self, error: BaseException) -> None:
        """Close a group without waiting for the other members, after an error of this rank."""
        if not self.closed and self._pid == os.getpid():
            self.close_locally(f"left the group with {type(error).__name__}")

    def start(self, call: Call, run: Callable[[], T]) -> Work[T]:
        """Make a call after those that are pending, without waiting for it.

        Raises:
            NotJoinedError: The session of the group is closed.
            InvalidArgumentError: This rank is not a member, or the group is closed.
            CollectiveError: This rank is in another collective of the group.
            RuntimeError: No thread can be started, and no call is pending.
        """
        group_rank = self.require_member()
        self._guard.check_start(call)
        if self._guard.works is None:
            name = f"rankwise: a group of {self.size} ranks"
            self._guard.works = WorkQueue(name, self.ranks[group_rank], self._context.timeout)
        return self._guard.works.start(call.operation, call_site(), run)

    def finish_works(self, seconds: float | None) -> None:
        """Wait at most so long for the non-blocking calls of this group and those made from it, and end the rest."""
        start = time.monotonic()
        for child in list(self._children):
            if isinstance(child, Comm):
                child.finish_works(seconds)
            seconds = None if seconds is None else max(0, seconds - (time.monotonic() - start))
        if self._guard.works is not None:
            self._guard.works.finish(seconds)

    def close_children(self, reason: str) -> None:
        """Close the groups that were made from this one, without waiting for other members."""
        for child in list(self._children):
            child.close_locally(reason)
        self._context.close_unreferenced()

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> Prepared[Completion[torch.Tensor]]:
        """Prepare the reduction of the members' tensors, which have the same shape and type.

        Raises:
            PayloadTypeError: The operation is not defined for the tensor's type or layout.
        """
        recipe = plan(tensor.dtype, op)
        wire = recipe.start(dense(tensor))
        reduce = self.reduce(wire, op)

        def run() -> Completion[torch.Tensor]:
            reduce()
            return lambda: recipe.finish(wire, self.size).reshape(tensor.shape)

        return run

    def reduce(self, wire: torch.Tensor, op: Op) -> Prepared[None]:
        """Prepare to reduce a contiguous tensor in place, in the wire format of the operation.

        What no data plane reduces is gathered, and reduced by every member.
        """
        if wire.is_complex() and op.is_linear:
            wire = torch.view_as_real(wire)
        plane = self._plane(Operation.ALL_REDUCE, wire.device)
        return plane.all_reduce(wire, op) if wire.dtype in plane.support.dtypes else self._reduce_gathered(wire, op)

    def _reduce_gathered(self, wire: torch.Tensor, op: Op) -> Prepared[None]:
        gather = self.all_gather(wire)

        def run() -> None:
            fold(gather(), op, out=wire)

        return run

    def reduce_scatter(self, tensors: Sequence[torch.Tensor], op: Op) -> Prepared[Completion[torch.Tensor]]:
        """Prepare the reduction of the members' tensors for this rank; each member passes a tensor for each member.

        The tensors have one type and one device.
        """
        own = self.require_member()
        recipe = plan(tensors[0].dtype, op)
        wires = [recipe.start(dense(tensor)).reshape(-1) for tensor in tensors]
        sizes = [wire.numel() for wire in wires]
        flat = torch.cat(wires)
        shape = tensors[own].shape
        plane = self._plane(Operation.REDUCE_SCATTER, flat.device)
        if len(set(sizes)) == 1 and flat.dtype in plane.support.dtypes:
            scatter = plane.reduce_scatter(flat.split(sizes), op)

            def run_scatter() -> Completion[torch.Tensor]:
                piece = scatter()
                return lambda: recipe.finish(piece, self.size).reshape(shape)

            return run_scatter

        # No data plane scatters pieces of different sizes.
        reduce = self.reduce(flat, op)

        def run() -> Completion[torch.Tensor]:
            reduce()
            return lambda: recipe.finish(flat.split(sizes)[own].clone(), self.size).reshape(shape)

        return run

    def all_gather(self, tensor: torch.Tensor) -> Prepared[list[torch.Tensor]]:
        """Prepare to gather the members' tensors, by group rank; they have the same shape and type."""
        gather = self._plane(Operation.ALL_GATHER, tensor.device).all_gather(as_bytes(tensor))
        return lambda: [from_bytes(part, tensor.dtype, tensor.shape) for part in gather()]

    def broadcast(self, data: torch.Tensor, src: int) -> Prepared[None]:
        """Prepare to fill `data`, a flat uint8 tensor of one length on all members, from group rank `src`."""
        return self._plane(Operation.BROADCAST, data.device).broadcast(data, src) if data.numel() else _do_nothing

    def transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Prepared[None]:
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

    def all_to_all(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Prepared[None]:
        """Prepare to send a flat uint8 tensor to each other member, and to fill one from each, by group rank.

        Those at this rank's index are neither sent nor filled.
        """
        others = [other for other in range(self.size) if other != self.require_member()]
        return self.transfer(
            [(outgoing[other], other) for other in others], [(incoming[other], other) for other in others]
        )

    def _plane(self, operation: Operation, device: torch.device) -> DataPlane:
        """Return the first data plane that supports an operation on tensors of a device.

        Raises:
            PayloadTypeError: None does.
        """
        for plane in self.planes:
            if plane.support.covers(operation, device):
                return plane
        name = operation.name.lower()
        raise PayloadTypeError(f"{name} of tensors on {device.type} is not supported in this group")

    def group_rank_of(self, rank: int | GroupRank, name: str) -> int:
        """Return the group rank of a member, which users pass as a global rank or as a `GroupRank`.

        Raises:
            InvalidArgumentError: There is no such member, or `rank` is of another type; `name` is the argument's name.
        """
        if not isinstance(rank, GroupRank):
            return super().group_rank_of(rank, name)
        if rank.index < self.size:
            return rank.index
        raise InvalidArgumentError(
            f"{name}={rank} is not a member: the group has {self.size} ranks, the last is GroupRank({self.size - 1})"
        )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its gradient and its class, and with conjugation and negation applied to its memory.

    Raises:
        PayloadTypeError: The tensor cannot be reduced; see `require_dense`.
    """
    return require_dense(tensor).detach().resolve_conj().resolve_neg()


def require_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that can be reduced, without its class.

    Raises:
        PayloadTypeError: It is sparse, quantized, nested or has no contents, or its class stores them elsewhere.
    """
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        tensor = _plain(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        form = "nested" if tensor.is_nested else str(tensor.layout)
        raise PayloadTypeError(f"only dense tensors can be reduced, got {form} on {tensor.device}")
    require_memory(tensor)
    return tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a subclass as a plain torch.Tensor.

    Raises:
        PayloadTypeError: The subclass has no memory of its own: it wraps other tensors, as DTensor does, or has no
            data, as FakeTensor does.
    """
    name = type(tensor).__qualname__
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise PayloadTypeError(
            f"a {name} has no memory of its own that could be reduced; pass the tensors that it wraps, such as "
            "tensor.to_local() or tensor.full_tensor() of a DTensor"
        )
    if is_lazy(tensor):
        raise PayloadTypeError(f"a {name} has no contents yet: call the module with a batch first")
    return without_class(tensor)


def _do_nothing() -> None:
    """Transfer no data."""
