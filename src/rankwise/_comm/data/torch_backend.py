"""The data plane over a torch process group with any backends, opened by rankwise or by other code."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from rankwise._backends import BackendConfig
from rankwise._comm.buffers import side_by_side
from rankwise._comm.control.call import Move
from rankwise._comm.control.flow import SLICE_SECONDS
from rankwise._comm.data.plane import DataPlane, Operation, Pieces, Support
from rankwise._comm.reduce_ops import Op
from rankwise._torch import copy_each
from rankwise.errors import CollectiveError, NotJoinedError, PayloadTypeError, RankwiseError

# After a member has left, its last data may arrive for so long.
_LAST_DATA_SECONDS: Final = 2.0
_SUPPORT: Final = Support()
_all_gather_single: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before 2.13


class TorchPlane(DataPlane):
    """Moves tensors by the backends of a process group.

    A tensor on a device without a backend in the group is copied to a device with one: the CPU if possible. This class
    has only a weak reference to the process group: see docs/decisions/0006-letting-go-of-a-group.md.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        dead_ranks: Callable[[], str],
    ) -> None:
        """Use a process group.

        Args:
            group: The process group; None if this rank is not a member.
            ranks: The global ranks of the members.
            rank: The global rank of this process.
            device: This rank's device.
            dead_ranks: Returns the dead members, with reasons; "" if none is known. Does not wait.
        """
        self.backend = None if group is None else dist.get_backend_config(group)
        backends = {} if self.backend is None else dict(BackendConfig.parse(self.backend).pairs)
        self.staging_device = torch.device("cpu") if "cpu" in backends else device
        # gloo supports CUDA tensors in some operations only, so it gets none; and none of other devices than those of
        # the session, since ranks without them receive on the CPU.
        own = backends.get(device.type, "gloo")
        self._moved = {self.staging_device.type} | ({device.type} if own != "gloo" else set())
        self._group_ref = None if group is None else weakref.ref(group)
        self._bound = None if group is None else group.bound_device_id
        self._is_connected = self._bound is not None
        self._ranks = ranks
        self._rank = rank
        self._dead_ranks = dead_ranks

    @property
    def support(self) -> Support:
        return _SUPPORT

    def covers(self, operation: Operation, device: torch.device) -> bool:
        # A group that is not bound to a device is connected by its first operation on one, in which all members take
        # part: with NCCL, some of them would wait in it for ever.
        is_early = operation is Operation.TRANSFER and device.type != "cpu" and not self._is_connected
        return not is_early and self.support.covers(operation, device)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None if this rank is not a member, or if the process group was destroyed."""
        return None if self._group_ref is None else self._group_ref()

    def close(self) -> None:
        self._group_ref = None

    def moves(self, device: torch.device) -> bool:
        return device.type in self._moved

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._bound is not None and tensor.device.type == self._bound.type and tensor.device != self._bound:
            raise PayloadTypeError(
                f"a tensor is on {tensor.device}, and the device of rank {self._rank} is {self._bound}, to which the "
                "process group is bound: move the tensor, as in tensor.to(rankwise.device())"
            )
        return super().stage(tensor)

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Move:
        return self._run("all_reduce", dist.all_reduce, tensor, op=op.torch_op)

    # Of a list of tensors on a device, backends such as NCCL make one buffer when the operation is run, where no rank
    # may fail alone any more. So that buffer is made here, unless the tensors are in one already.

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: Op) -> Move:
        if out.device.type == "cpu":
            return self._run("reduce_scatter", dist.reduce_scatter, out, list(pieces), op=op.torch_op)
        return self._run("reduce_scatter", dist.reduce_scatter_tensor, out, torch.cat(list(pieces)), op=op.torch_op)

    def _all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Move:
        if data.device.type == "cpu":
            return self._run("all_gather", dist.all_gather, list(gathered), data)
        joined = side_by_side(gathered)
        if joined is not None:
            return self._run("all_gather", _all_gather_single, joined, data)
        buffer = data.new_empty(len(gathered) * data.numel())
        gather = self._run("all_gather", _all_gather_single, buffer, data)

        def run() -> None:
            gather()
            copy_each(list(gathered), list(buffer.split(data.numel())))

        return run

    def _broadcast(self, data: torch.Tensor, src: int) -> Move:
        return self._run("broadcast", dist.broadcast, data, src=self._ranks[src])

    def _transfer(self, outgoing: Pieces, incoming: Pieces) -> Move:
        def run() -> None:
            with self._named_errors("the transfer between two ranks") as group:
                operations = [dist.P2POp(dist.isend, data, self._ranks[dst], group) for data, dst in outgoing]
                operations += [dist.P2POp(dist.irecv, data, self._ranks[src], group) for data, src in incoming]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()

        return run

    def _run(
        self,
        name: str,
        operation: Callable[..., dist.Work | None],
        *tensors: torch.Tensor | list[torch.Tensor],
        **options: object,
    ) -> Move:
        """Return a move by an operation of torch.distributed."""
        is_on_cpu = all(tensor.device.type == "cpu" for tensor in tensors if isinstance(tensor, torch.Tensor))

        def run() -> None:
            with self._named_errors(name) as group:
                self._wait(operation(*tensors, **options, group=group, async_op=True), is_on_cpu=is_on_cpu)
            self._is_connected = self._is_connected or not is_on_cpu

        return run

    def _wait(self, work: dist.Work | None, *, is_on_cpu: bool) -> None:
        """Wait for an operation of the process group; on the CPU, stop waiting once a member is gone.

        In gloo only the neighbours of a dead rank notice its death. The others would wait for the full timeout.
        """
        if work is None:
            return
        if not is_on_cpu:
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
            dead = self._dead_ranks()
            if dead:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > _LAST_DATA_SECONDS:
                    raise CollectiveError(f"the data did not come: {dead}")

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
            where = f" on rank {self._rank} of {len(self._ranks)}"
            cause = self._dead_ranks() or "a rank died, or did not take part in time"
            raise CollectiveError(f"{operation} failed{where}: {cause}. torch reports: {error}") from error
