"""Comm over a torch process group with any backends, opened by rankwise or by other code."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from rankwise._backends import BackendConfig
from rankwise._comm.buffers import memory_of
from rankwise._comm.comm import Comm
from rankwise._comm.control.agreement import Prepared
from rankwise._comm.control.channel import Channel, try_lock
from rankwise._comm.control.links import SLICE_SECONDS
from rankwise._comm.control.protocol import Call, Frame
from rankwise._comm.control.verdict import Combine, Verdict
from rankwise._comm.data.local import LocalTransport
from rankwise._comm.reduce_ops import Op
from rankwise._comm.registry import GroupRegistry
from rankwise._torch import gloo_on_loopback
from rankwise.errors import CollectiveError, NotJoinedError, RankwiseError

# After a member has left, its last data may arrive for so long.
_LAST_DATA_SECONDS: Final = 2.0


class TorchGroupComm(Comm):
    """Comm over a torch process group.

    A tensor on a device without a backend in the group is copied to a device with one: the CPU if possible. This class
    has only a weak reference to the process group: see docs/decisions/0006-letting-go-of-a-group.md.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, ranks: Sequence[int], registry: GroupRegistry) -> None:
        backend = None if group is None else dist.get_backend_config(group)
        self._backends = {} if backend is None else dict(BackendConfig.parse(backend).pairs)
        control_device = torch.device("cpu") if "cpu" in self._backends else registry.device
        super().__init__(
            ranks=ranks,
            global_rank=registry.rank,
            device=registry.device,
            control_device=control_device,
            check=registry.check,
            backend=backend,
        )
        # On one host the backend listens on loopback, where other users can connect. Bytes that are unpickled must not
        # come from there, so even a large group uses frames.
        self.uses_mesh = self.uses_mesh or registry.one_host
        self._group_ref = None if group is None else weakref.ref(group)
        self._registry = registry
        self._number = registry.num_groups
        registry.num_groups += 1
        self._channel: Channel | None = None
        self._local: LocalTransport | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None if this rank is not a member, or if the process group was destroyed."""
        return None if self._group_ref is None else self._group_ref()

    def connect(self) -> None:
        """Open the channel to the other members, if this group uses frames.

        Local, but Collective over the session for its first group.

        Raises:
            CollectiveError: They could not be reached, or did not come in time.
        """
        if self._channel is None and self.uses_mesh and self.size > 1 and self.rank is not None:
            self._channel = self._registry.open_channel(self._number, self.ranks)
            if self._channel.same_host:
                self._local = LocalTransport(self._channel, self.rank, timeout=self._registry.timeout)

    def shutdown(self, reason: str) -> None:
        """Close the connections, and drop the process group and those that were made from it."""
        super().shutdown(reason)
        self._group_ref = None
        self._close_channel(reason)
        if self._number == 0:  # the group of the session, which also ends groups without references
            self._registry.close(reason)

    def close_locally(self, reason: str) -> None:
        super().close_locally(reason)
        self._registry.destroy_process_group(self._number)

    def close_children(self, reason: str) -> None:
        super().close_children(reason)
        self._registry.close_unreferenced()

    def dead_ranks(self, ranks: Container[int] | None = None) -> str:
        with try_lock(self._channel) as channel:
            return "" if channel is None else channel.dead_ranks(ranks)

    def pending_call_from(self, rank: int) -> bool:
        with try_lock(self._channel) as channel:
            return channel is not None and channel.pending_call(rank) is not None

    def shared_store(self) -> dist.Store | None:
        return dist.PrefixStore(f"group/{self._number}", self._registry.store()) if self.size > 1 else None

    def new_group(self, ranks: Sequence[int]) -> Comm:
        self._registry.close_unreferenced()
        with self._named_errors("new_group"), gloo_on_loopback() if self._registry.one_host else nullcontext():
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=self._registry.timeout))
        process_group = group if isinstance(group, dist.ProcessGroup) else None
        child = TorchGroupComm(process_group, ranks=tuple(ranks), registry=self._registry)
        self.add_child(child)
        self._registry.track_process_group(child._number, process_group, child)
        child.connect()
        return child

    def _agree_by_frames(
        self, call: Call, message: bytes, combine: Combine | None, read: Collection[int], timeout: float | None
    ) -> Verdict:
        channel = self._opened_channel()
        suspects: set[int] = set()

        def on_pause(missing: Sequence[int]) -> None:
            self._registry.detect_cross_group_deadlock(channel, call.text, missing, suspects)

        wait = self._registry.timeout if timeout is None else timeout
        verdict = channel.agree(call, message, combine=combine, read=read, timeout=wait, on_pause=on_pause)
        for waiting in verdict.waiting:
            self._registry.notify_other_group(channel, call.text, waiting)
        return verdict

    def _post_frame(self, frame: Frame) -> None:
        channel = self._opened_channel()
        with channel.lock:
            channel.post(frame, timeout=self._registry.timeout)

    def _opened_channel(self) -> Channel:
        self.connect()
        if self._channel is None:
            raise NotJoinedError(f"this group cannot be used any more: {self._broken_reason or 'it was closed'}")
        return self._channel

    def _mark_broken(self, reason: str) -> None:
        super()._mark_broken(reason)
        self._close_channel(reason)

    def _close_channel(self, reason: str) -> None:
        self._registry.close_channel(self._number, reason)
        self._channel = self._local = None

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Prepared[None]:
        if self._local is not None and tensor.device.type == "cpu":
            return self._local.all_reduce(tensor.view(-1), op)
        staged = self._stage(tensor)

        def run() -> None:
            with self._named_errors("all_reduce") as group:
                self._wait(dist.all_reduce(staged, op=op.torch_op, group=group, async_op=True), staged)
                if staged is not tensor:
                    tensor.copy_(staged)

        return run

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> Prepared[torch.Tensor]:
        if self._local is not None and pieces[0].device.type == "cpu":
            return self._local.reduce_scatter(pieces, op)
        staged = [self._stage(piece) for piece in pieces]
        reduced = torch.empty_like(staged[0])

        def run() -> torch.Tensor:
            with self._named_errors("reduce_scatter") as group:
                work = dist.reduce_scatter(reduced, staged, op=op.torch_op, group=group, async_op=True)
                self._wait(work, reduced)
            return reduced.to(pieces[0].device)

        return run

    def _all_gather(self, data: torch.Tensor) -> Prepared[list[torch.Tensor]]:
        if self._local is not None and data.device.type == "cpu":
            return self._local.all_gather(data)
        staged = self._stage(data)
        gathered = [torch.empty_like(staged) for _ in self.ranks]

        def run() -> list[torch.Tensor]:
            with self._named_errors("all_gather") as group:
                self._wait(dist.all_gather(gathered, staged, group=group, async_op=True), staged)
            return gathered if staged is data else [part.to(data.device) for part in gathered]

        return run

    def _broadcast(self, data: torch.Tensor, src: int) -> Prepared[None]:
        if self._local is not None and data.device.type == "cpu":
            return self._local.broadcast(data, src)
        staged = self._stage(data)

        def run() -> None:
            with self._named_errors("broadcast") as group:
                self._wait(dist.broadcast(staged, src=self.ranks[src], group=group, async_op=True), staged)
                if staged is not data:
                    data.copy_(staged)

        return run

    def _transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Prepared[None]:
        sent = [(self._stage(data), dst) for data, dst in outgoing]
        received = [(self._stage(data), src) for data, src in incoming]

        def run() -> None:
            if self._channel is not None and all(data.device.type == "cpu" for data, _ in [*sent, *received]):
                self._channel.transfer(
                    {dst: memory_of(data) for data, dst in sent},
                    {src: memory_of(data) for data, src in received},
                    timeout=self._registry.timeout,
                )
            else:
                self._transfer_by_group(sent, received)
            for (buffer, _), (data, _) in zip(received, incoming, strict=True):
                if buffer is not data:
                    data.copy_(buffer)

        return run

    def _transfer_by_group(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        with self._named_errors("the transfer between two ranks") as group:
            operations = [dist.P2POp(dist.isend, data, self.ranks[dst], group) for data, dst in outgoing]
            operations += [dist.P2POp(dist.irecv, data, self.ranks[src], group) for data, src in incoming]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def _wait(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        """Wait for an operation of the process group; on the CPU, stop waiting once a member is gone.

        In gloo only the neighbours of a dead rank notice its death. The others would wait for the full timeout.
        """
        if work is None:
            return
        if tensor.device.type != "cpu" or self._channel is None:
            work.wait()
            return
        lost_since: float | None = None
        while True:
            try:
                work.wait(timedelta(seconds=SLICE_SECONDS))
            except RuntimeError:
                if work.is_completed():
                    raise
            else:
                return
            dead = self._channel.dead_ranks()
            if dead:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > _LAST_DATA_SECONDS:
                    raise CollectiveError(f"the data did not come: {dead}")

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on a device with a backend: the tensor itself if possible."""
        if tensor.device.type == "cpu":
            return tensor.to(self.control_device)
        backend = self._backends.get(tensor.device.type, "gloo")
        # gloo supports CUDA tensors in some operations only, so it gets none.
        return tensor.to(self.control_device) if backend == "gloo" else tensor

    @contextmanager
    def _named_errors(self, operation: str) -> Iterator[dist.ProcessGroup]:
        """Give the process group; errors of torch name the operation, the rank, and the cause if it is known."""
        group = self.group
        if group is None:  # torch would use the default group, which may be another one by now
            raise NotJoinedError.destroyed()
        try:
            yield group
        except RankwiseError:
            raise
        except (RuntimeError, ValueError) as error:
            if not dist.is_initialized():
                raise NotJoinedError.destroyed() from error
            where = "" if self.rank is None else f" on rank {self.ranks[self.rank]} of {self.size}"
            cause = self.dead_ranks() or "a rank died, or did not take part in time"
            raise CollectiveError(f"{operation} failed{where}: {cause}. torch reports: {error}") from error
