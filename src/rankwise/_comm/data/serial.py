"""A group of one rank: the same checks, shapes, copies and errors as in larger groups, without communication."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

import torch

from rankwise._comm.comm import Comm
from rankwise._comm.control.agreement import Prepared
from rankwise._comm.control.protocol import Call, Frame
from rankwise._comm.control.verdict import Combine
from rankwise._comm.reduce_ops import Op
from rankwise.errors import InvalidArgumentError


class SerialComm(Comm):
    """The group of a single process."""

    def __init__(self, *, device: torch.device, ranks: Sequence[int] = range(1)) -> None:
        super().__init__(ranks=ranks, global_rank=0, device=device, control_device=torch.device("cpu"))

    def new_group(self, ranks: Sequence[int]) -> Comm:
        child = SerialComm(device=self.device, ranks=tuple(ranks))
        self.add_child(child)
        return child

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Prepared[None]:  # noqa: ARG002
        return _do_nothing  # the reduction of one tensor is that tensor

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> Prepared[torch.Tensor]:  # noqa: ARG002
        piece = pieces[0].clone()
        return lambda: piece

    def _all_gather(self, data: torch.Tensor) -> Prepared[list[torch.Tensor]]:
        gathered = [data.clone()]
        return lambda: gathered

    def _broadcast(self, data: torch.Tensor, src: int) -> Prepared[None]:  # noqa: ARG002
        return _do_nothing  # the data is here already

    def _transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Prepared[None]:
        if outgoing or incoming:
            raise InvalidArgumentError("there is no other rank to transfer to or from")
        return _do_nothing

    def _agree_by_frames(
        self, call: Call, message: bytes, combine: Combine | None, read: Collection[int], timeout: float | None
    ) -> NoReturn:
        raise NotImplementedError("there is no other member to agree with")

    def _post_frame(self, frame: Frame) -> None:
        """Do nothing: there are no other members."""


def _do_nothing() -> None:
    """Transfer no data."""
