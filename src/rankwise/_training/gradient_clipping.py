"""Clipping of gradients by their norm, over ranks that have the same parameters, or over shards of them.

The norms of DTensors, as those of FSDP2, are torch's: it knows which rank has what.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Final

import torch

from rankwise._arguments import as_bool
from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._comm.dense_tensors import dense
from rankwise._text import ranks_by_value
from rankwise._training.gradients import listed_parameters
from rankwise.errors import CollectiveError, InvalidArgumentError, MismatchError, shown

_NORM: Final = struct.Struct("<d")


def clip_grad_norm_(
    parameters: torch.nn.Module | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    sharded: bool = False,
    error_if_nonfinite: bool = False,
    group: GroupLike | None = None,
) -> torch.Tensor:
    """Scale gradients down so that their total norm is at most `max_norm`, in place, and return the norm from before.

    Collective over the session, or over `group`. All ranks scale by the same factor.

    Args:
        parameters: A module or parameters; those without gradients are ignored.
        max_norm: The largest norm.
        norm_type: The type of the norm; infinity for the maximum.
        sharded: Whether each rank has other parameters, whose norm is one over all ranks. If False, all ranks have the
            same gradients, as after `sync_grads`: that their norms are the same is checked. DTensors, such as those of
            FSDP2, count as a whole, of which torch collects the norm from the ranks of their mesh: with them it is
            False, unless each rank of `group` is in another mesh, as those of a pipeline are.
        error_if_nonfinite: Whether a norm that is infinite or not a number is an error, on all ranks.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.

    Returns:
        The norm, a tensor without dimensions, on the device of the first gradient.

    Raises:
        InvalidArgumentError: An argument is not as above.
        PayloadTypeError: A gradient is not dense.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The norms differ between ranks, with sharded=False; or another rank calls another collective.
        CollectiveError: The norm is infinite or not a number, with `error_if_nonfinite`; or a rank is dead, or did not
            call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> weight.grad = torch.full((4,), 3.0)
        >>> clip_grad_norm_([weight], 1.0)  # on 2 ranks, with sharded=True: tensor(8.4853)
        tensor(6.)
        >>> weight.grad
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    comm = comm_of(group)
    with torch.no_grad():
        with comm.call("clip_grad_norm_") as call:
            trained = [one for one in listed_parameters(parameters, "clip_grad_norm_") if one.grad is not None]
            largest, power = _number(max_norm, "max_norm"), _number(norm_type, "norm_type")
            if not power > 0:
                raise InvalidArgumentError(f"norm_type={shown(norm_type)} is not above 0")
            is_sharded, is_checked = as_bool(sharded, "sharded"), as_bool(error_if_nonfinite, "error_if_nonfinite")
            call.settings = {"max_norm": largest, "norm_type": power, "sharded": is_sharded, "checked": is_checked}
            by_mesh = _by_mesh(trained)
            meshes = [mesh for mesh in by_mesh if mesh is not None]
            for mesh in meshes:
                if is_sharded and len(set(mesh.mesh.flatten().tolist()) & set(comm.ranks)) > 1:
                    raise InvalidArgumentError(
                        f"sharded=True, and there are gradients of {mesh}, which has several ranks of this group: "
                        "leave it out, since DTensors count as a whole"
                    )
            if meshes:
                call.settings = {**call.settings, "meshes": len(meshes)}
                call.verify()  # before torch's collectives
                call.begin_data()
            own = _total([_norm(mesh, parameters, power) for mesh, parameters in by_mesh.items()], power)
            norms = [_NORM.unpack(data)[0] for data in call.all_gather(_NORM.pack(own))]
        if is_sharded:
            total = _total(norms, power)
        else:
            _require_same(norms, comm.ranks)
            total = own
        if is_checked and not math.isfinite(total):
            raise CollectiveError(f"the norm of the gradients is {total}, and error_if_nonfinite=True")
        first = trained[0].grad if trained else None
        norm = torch.tensor(total) if first is None else torch.tensor(total, dtype=first.dtype, device=first.device)
        for same in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(same, largest, norm)
    return norm


def _by_mesh(parameters: Iterable[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """Return parameters by the mesh of their gradients, in the order of parameters; that of other tensors is None."""
    distributed = sys.modules.get("torch.distributed.tensor")
    found: dict[Any, list[torch.Tensor]] = {}
    for one in parameters:
        grad: Any = one.grad
        is_distributed = distributed is not None and isinstance(grad, distributed.DTensor)
        found.setdefault(grad.device_mesh if is_distributed else None, []).append(one)
    return found


def _norm(mesh: Any, parameters: Sequence[torch.Tensor], power: float) -> float:  # noqa: ANN401 - a DeviceMesh
    """Return the norm of gradients; collective over the ranks of their mesh, if they have one."""
    grads = [one.grad for one in parameters if one.grad is not None]
    if mesh is None:
        return float(torch.nn.utils.get_total_norm(list(map(dense, grads)), power))
    norm: Any = torch.nn.utils.get_total_norm(grads, power)
    return float(norm.full_tensor())


def _total(norms: Sequence[float], power: float) -> float:
    """Return the norm of several norms; scaled by the largest, so that powers do not overflow."""
    largest = max(norms, default=0.0)
    if len(norms) == 1 or not 0 < largest < math.inf or any(map(math.isnan, norms)):
        return sum(norms)  # 0, infinite or not a number
    if math.isinf(power):
        return largest
    return float(largest * math.fsum((norm / largest) ** power for norm in norms) ** (1 / power))


def _require_same(norms: Sequence[float], ranks: Sequence[int]) -> None:
    texts = [repr(norm) for norm in norms]
    if len(set(texts)) > 1:
        raise MismatchError(
            f"the norms of the gradients differ: {ranks_by_value(ranks, texts)}; call sync_grads before, or pass "
            "sharded=True if each rank has other parameters"
        )


def _number(value: object, name: str) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.nan
        if number >= 0:
            return number
    raise InvalidArgumentError(f"{name}={shown(value)} is not a number of at least 0")
