"""Comm over a torch process group, whatever its backends and whoever opened it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from rankwise._torch import gloo_on_loopback
from rankwise.comm.comm import Comm
from rankwise.comm.ops import Op
from rankwise.errors import CollectiveError, NotJoinedError

_REDUCE_OPS: Final = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
}


class TorchGroupComm(Comm):
    """Comm over a torch process group.

    A tensor on a device that the group has no backend for travels through one it has: the CPU if possible.

    Attributes:
        group: The process group; None for a rank that is not a member.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks: Sequence[int],
        global_rank: int,
        device: torch.device,
        timeout: float | None,
        loopback: bool = False,
    ) -> None:
        self._backends = _backends(group)
        control = torch.device("cpu") if "cpu" in self._backends else device
        super().__init__(ranks=ranks, global_rank=global_rank, device=device, control=control)
        self.group = group
        self._timeout = timeout
        self._loopback = loopback
        self._parts: list[TorchGroupComm] = []

    def close(self) -> None:
        """Let go of the process group, and of those that were made from it.

        Whoever destroys them relies on being the last to hold them: a group whose threads still run when the process
        ends takes it down with SIGABRT.
        """
        super().close()
        self.group = None
        for part in self._parts:
            part.close()
        self._parts.clear()

    def new_group(self, ranks: Sequence[int]) -> Comm:
        me = self.ranks[self.require_member()]
        timeout = None if self._timeout is None else timedelta(seconds=self._timeout)
        with self._explained("new_group"), gloo_on_loopback() if self._loopback else nullcontext():
            group = dist.new_group(list(ranks), timeout=timeout)
        part = TorchGroupComm(
            group if isinstance(group, dist.ProcessGroup) else None,
            ranks=tuple(ranks),
            global_rank=me,
            device=self.device,
            timeout=self._timeout,
            loopback=self._loopback,
        )
        self._parts.append(part)
        return part

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        with self._explained("all_reduce"):
            staged = self._stage(tensor)
            dist.all_reduce(staged, op=_REDUCE_OPS[op], group=self.group)
            if staged is not tensor:
                tensor.copy_(staged)

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
        with self._explained("reduce_scatter"):
            staged = [self._stage(piece) for piece in pieces]
            reduced = torch.empty_like(staged[0])
            dist.reduce_scatter(reduced, staged, op=_REDUCE_OPS[op], group=self.group)
            return reduced.to(pieces[0].device)

    def _all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        with self._explained("all_gather"):
            staged = self._stage(data)
            gathered = [torch.empty_like(staged) for _ in self.ranks]
            dist.all_gather(gathered, staged, group=self.group)
            return gathered if staged is data else [part.to(data.device) for part in gathered]

    def _broadcast(self, data: torch.Tensor, src: int) -> None:
        with self._explained("broadcast"):
            staged = self._stage(data)
            dist.broadcast(staged, src=self.ranks[src], group=self.group)
            if staged is not data:
                data.copy_(staged)

    def _transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        if not outgoing and not incoming:
            return
        with self._explained("the transfer between two ranks"):
            sends = [
                dist.P2POp(dist.isend, self._stage(data), self.ranks[place], self.group) for data, place in outgoing
            ]
            staged = [self._stage(data) for data, _ in incoming]
            receives = [
                dist.P2POp(dist.irecv, buffer, self.ranks[place], self.group)
                for buffer, (_, place) in zip(staged, incoming, strict=True)
            ]
            for work in dist.batch_isend_irecv([*sends, *receives]):
                work.wait()
            for buffer, (data, _) in zip(staged, incoming, strict=True):
                if buffer is not data:
                    data.copy_(buffer)

    def _barrier(self) -> None:
        with self._explained("barrier"):
            token = torch.ones(1, dtype=torch.int32, device=self.control)
            dist.all_reduce(token, group=self.group)
            token.item()  # on an accelerator, the reduction has only been queued so far

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on a device that the group can send from: itself, if it can."""
        if tensor.device.type == "cpu":
            return tensor.to(self.control)
        backend = self._backends.get(tensor.device.type, "gloo")
        # gloo takes CUDA tensors in some operations and not in others: it gets none.
        return tensor.to(self.control) if backend == "gloo" else tensor

    @contextmanager
    def _explained(self, operation: str) -> Iterator[None]:
        """Say which collective broke off, on which rank, in torch's own words."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not dist.is_initialized():
                raise NotJoinedError(
                    f"{operation} failed: the process group was destroyed by other code; call rankwise.init() again"
                ) from error
            where = "" if self.rank is None else f" on rank {self.ranks[self.rank]} of {self.size}"
            raise CollectiveError(
                f"{operation} broke off{where}: {error}. A rank died, or did not take part in time"
            ) from error


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend for each device type: "cpu:gloo,cuda:nccl" -> {"cpu": "gloo", "cuda": "nccl"}."""
    if group is None:
        return {}
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}
