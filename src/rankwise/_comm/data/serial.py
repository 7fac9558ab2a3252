"""The data plane of a group of one rank: the same copies and errors as in larger groups, without communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rankwise._comm.control.call import Move
from rankwise._comm.data.plane import DataPlane, Pieces, Support
from rankwise._comm.reduce_ops import Op
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import InvalidArgumentError

_SUPPORT = Support()


class SerialPlane(DataPlane):
    """Moves the tensors of a single rank to itself."""

    @property
    def support(self) -> Support:
        return _SUPPORT

    def moves(self, device: torch.device) -> bool:  # noqa: ARG002
        return True

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Move:  # noqa: ARG002
        if tensor.device.type == DEVICE_TYPE:
            from rankwise._torch_xla import execute  # noqa: PLC0415 - not needed without such devices

            execute()  # as in larger groups, or the steps of a training loop become one graph
        return _do_nothing  # the reduction of one tensor is that tensor

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: Op) -> Move:  # noqa: ARG002
        out.copy_(pieces[0])
        return _do_nothing

    def _all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Move:
        gathered[0].copy_(data)
        return _do_nothing

    def _broadcast(self, data: torch.Tensor, src: int) -> Move:  # noqa: ARG002
        return _do_nothing  # the data is here already

    def _transfer(self, outgoing: Pieces, incoming: Pieces) -> Move:  # noqa: ARG002
        raise InvalidArgumentError("there is no other rank to transfer to or from")


def _do_nothing() -> None:
    """Transfer no data."""
