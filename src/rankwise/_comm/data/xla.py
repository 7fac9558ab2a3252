"""The data plane over the devices of torch_xla. Only reductions of all ranks run there; other planes do the rest.

XLA has no operation for some of the ranks alone, nor for tensors whose sizes differ, and executes an operation when the
operations before it do. So that an error of one rank leaves no other one waiting, a reduction is executed by all ranks
once they have agreed on it, in a graph of its own: what ranks do before or after it may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from rankwise import _torch_xla
from rankwise._comm.control.call import Move
from rankwise._comm.data.plane import REAL_DTYPES, DataPlane, Operation, Pieces, Support
from rankwise._comm.reduce_ops import Op
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import PayloadTypeError

# The names that torch_xla has for the reductions. And and or are those of bools, as minimum and maximum of 0 and 1.
_REDUCTIONS: Final[Mapping[str, str]] = {
    "sum": "sum",
    "mean": "sum",
    "product": "mul",
    "min": "min",
    "max": "max",
    "and": "min",
    "or": "max",
}
# The types that devices of some kinds do not reduce.
_NOT_REDUCED: Final[Mapping[str, frozenset[torch.dtype]]] = {"CPU": frozenset({torch.bfloat16})}


class XlaPlane(DataPlane):
    """Reduces tensors on XLA devices, one for each rank of the session."""

    def __init__(self) -> None:
        self._support = Support(
            operations=frozenset({Operation.ALL_REDUCE}),
            devices=frozenset({DEVICE_TYPE}),
            dtypes=REAL_DTYPES - _NOT_REDUCED.get(_torch_xla.device_kind(), frozenset()),
        )

    @property
    def support(self) -> Support:
        return self._support

    def moves(self, device: torch.device) -> bool:
        return device.type == DEVICE_TYPE

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Move:
        # What is pending is executed before the ranks agree, since it may fail, and may differ between ranks.
        _torch_xla.execute()

        def run() -> None:
            _torch_xla.all_reduce(_REDUCTIONS[op.name], tensor)
            _torch_xla.execute()

        return run

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: Op) -> Move:  # noqa: ARG002
        raise _unsupported()

    def _all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Move:  # noqa: ARG002
        raise _unsupported()

    def _broadcast(self, data: torch.Tensor, src: int) -> Move:  # noqa: ARG002
        raise _unsupported()

    def _transfer(self, outgoing: Pieces, incoming: Pieces) -> Move:  # noqa: ARG002
        raise _unsupported()


def _unsupported() -> PayloadTypeError:
    return PayloadTypeError("XLA devices only reduce; another data plane does this")
