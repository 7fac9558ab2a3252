"""Clipping of gradients by their norm, over ranks that have the same parameters, or over shards of them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Final

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
            same gradients, as after `sync_grads`: that their norms are the same is checked.
        error_if_nonfinite: Whether a norm that is infinite or not a number is an error, on all ranks.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.

    Returns:
        The norm, a tensor without dimensions, on the device of the first gradient.

    Raises:
        InvalidArgumentError: An argument is not as above.
        PayloadTypeError: A gradient is not dense, or is a DTensor.
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
            grads = [dense(one.grad) for one in trained if one.grad is not None]
            own = float(torch.nn.utils.get_total_norm(grads, power)) if grads else 0.0
            norms = [_NORM.unpack(data)[0] for data in call.all_gather(_NORM.pack(own))]
        if is_sharded:
            total = max(norms) if math.isinf(power) else _total(norms, power)
        else:
            _require_same(norms, comm.ranks)
            total = own
        if is_checked and not math.isfinite(total):
            raise CollectiveError(f"the norm of the gradients is {total}, and error_if_nonfinite=True")
        norm = torch.tensor(total, dtype=grads[0].dtype if grads else None, device=grads[0].device if grads else "cpu")
        torch.nn.utils.clip_grads_with_norm_(trained, largest, norm)
    return norm


def _total(norms: Sequence[float], power: float) -> float:
    """Return the norm of several norms; scaled by the largest, so that powers do not overflow."""
    largest = max(norms)
    if not 0 < largest < math.inf:
        return sum(norms)  # 0, infinite or not a number
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
