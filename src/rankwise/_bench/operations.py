"""The collectives of `rankwise bench`: for each our function and the backend's own, on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from rankwise._collectives.all_gather import all_gather_cat
from rankwise._collectives.all_to_all import all_to_all
from rankwise._collectives.groups import barrier
from rankwise._collectives.reduce import all_reduce_
from rankwise._collectives.reduce_scatter import reduce_scatter
from rankwise._collectives.rooted import broadcast

# Before 2.13 they have other names.
_all_gather_single: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Memory:
    """What a collective works on, as one rank.

    Attributes:
        group: The process group.
        part: The elements of one rank.
        whole: Those of all ranks, if `Operation.has_parts`; else `part`.
        parts: Views of `whole`, one for each rank.
        other: As large as `whole`.
    """

    group: dist.ProcessGroup
    part: torch.Tensor
    whole: torch.Tensor
    parts: list[torch.Tensor]
    other: torch.Tensor


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective.

    Attributes:
        ours, backends: Our call and the backend's own.
        bus_factor: busbw by algbw, for a number of ranks: what the busiest link carries, as nccl-tests define it.
        has_parts: A size is that of the parts of all ranks together, and a count that of one of them.
        op: The reduction; "none" if there is none.
        has_data: It moves data.
    """

    ours: Callable[[Memory], object]
    backends: Callable[[Memory], object]
    bus_factor: Callable[[int], float]
    has_parts: bool = False
    op: str = "none"
    has_data: bool = True


def _but_own(size: int) -> float:
    return (size - 1) / size


OPERATIONS: Final[Mapping[str, Operation]] = {
    "all_reduce": Operation(
        lambda of: all_reduce_(of.whole),
        lambda of: dist.all_reduce(of.whole, group=of.group),
        lambda size: 2 * _but_own(size),
        op="sum",
    ),
    "broadcast": Operation(
        lambda of: broadcast(of.whole), lambda of: dist.broadcast(of.whole, src=0, group=of.group), lambda _: 1.0
    ),
    "all_gather": Operation(
        lambda of: all_gather_cat(of.part),
        lambda of: _all_gather_single(of.whole, of.part, group=of.group),
        _but_own,
        has_parts=True,
    ),
    "reduce_scatter": Operation(
        lambda of: reduce_scatter(of.parts),
        lambda of: _reduce_scatter_single(of.part, of.whole, group=of.group),
        _but_own,
        has_parts=True,
        op="sum",
    ),
    "all_to_all": Operation(
        lambda of: all_to_all(of.parts),
        lambda of: dist.all_to_all_single(of.other, of.whole, group=of.group),
        _but_own,
        has_parts=True,
    ),
    "barrier": Operation(lambda _: barrier(), lambda of: dist.barrier(of.group), lambda _: 1.0, has_data=False),
}
