"""A world of one: the same checks, shapes, copies and errors as a world of many, and nobody to talk to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rankwise.comm.comm import Comm
from rankwise.comm.frame import Frame
from rankwise.comm.ops import Op
from rankwise.errors import InvalidArgumentError


class SerialComm(Comm):
    """The comm of a process that is alone."""

    def __init__(self, *, device: torch.device, ranks: Sequence[int] = range(1)) -> None:
        super().__init__(ranks=ranks, global_rank=0, device=device, control=torch.device("cpu"))

    def new_group(self, ranks: Sequence[int]) -> Comm:
        return SerialComm(device=self.device, ranks=tuple(ranks))

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """The reduction of one tensor is that tensor."""

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> torch.Tensor:  # noqa: ARG002
        return pieces[0].clone()

    def _all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        return [data.clone()]

    def _broadcast(self, data: torch.Tensor, src: int) -> None:
        """What the only member has is what all have."""

    def _transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        if outgoing or incoming:
            raise InvalidArgumentError("there is no other rank to transfer to or from")

    def _swap(self, frame: Frame, bodies: Sequence[bytes], timeout: float | None) -> Mapping[int, Frame]:  # noqa: ARG002
        return {0: replace(frame, body=bodies[0])}

    def _say(self, frame: Frame) -> None:
        """There is nobody to hear it."""
