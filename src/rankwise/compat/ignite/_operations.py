"""Ignite's collectives, over rankwise's. In a single process they return their argument, as Ignite's do."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from numbers import Integral, Number
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.distributed import ProcessGroup

import rankwise
from rankwise import Group
from rankwise.compat.ignite._identity import joined_session
from rankwise.compat.ignite._model_backends import XLA
from rankwise.compat.ignite._queries import model_name
from rankwise.compat.ignite._subgroups import fail_collective, fail_unsupported_type, member_group
from rankwise.errors import InvalidArgumentError, PayloadTypeError
from rankwise.extend._dropins import as_integer, world_group
from rankwise.extend.collectives import collective, describe

_OPS: Final = {
    "SUM": "sum",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "AND": "and",
    "OR": "or",
    # Horovod's name for it, and torch's; Ignite's native model has none.
    "AVERAGE": "mean",
    "AVG": "mean",
    "MEAN": "mean",
}
# The result for bools is a bool: the sum of two that are true is true.
_BOOL_OPS: Final = _OPS | {"SUM": "or", "PRODUCT": "and"}
_BITWISE: Final = {"AND": operator.and_, "OR": operator.or_}


def all_reduce(tensor: Any, op: str = "SUM", group: Any | None = None) -> Any:  # noqa: ANN401 - Ignite's signature
    """Return the reduction of every rank's tensor or number; alone, and outside of the group, the argument itself.

    Collective over the world, or over `group`: its members call it, and others may.
    A tensor is reduced in place, on its own device, and returned. Numbers keep their type and are exact.

    Args:
        tensor: This rank's tensor or number.
        op: "SUM", "PRODUCT", "MIN", "MAX", "AND", "OR" (bit by bit for integers), "AVERAGE".
        group: A process group, or a list of ranks.

    Raises:
        InvalidArgumentError: There is no such op or group.
        PayloadTypeError: The op is not defined for the value.
        MismatchError: The ranks' values differ in shape or type, or another rank calls another collective.
        RemoteRankError: Another rank raised before it took part.
        CollectiveError: A rank ended, or did not arrive in time.

    Example:
        >>> all_reduce(3)
        3
    """
    session = joined_session()
    members = None if session is None else member_group(session, group)
    if op not in _OPS:
        error = InvalidArgumentError(f"Unsupported reduction operation: {op!r} is none of {', '.join(_OPS)}")
        if members is None:
            raise error
        fail_collective(members, "all_reduce", error)
    if not isinstance(tensor, (torch.Tensor, Number)):
        fail_unsupported_type(members, "all_reduce", tensor)
    if members is None:
        return tensor
    is_bool = tensor.dtype is torch.bool if isinstance(tensor, torch.Tensor) else isinstance(tensor, bool)
    if op in _BITWISE and not is_bool:
        return _reduce_bits(tensor, op, members)
    name = _BOOL_OPS[op] if is_bool else _OPS[op]
    if not isinstance(tensor, torch.Tensor):
        return rankwise.all_reduce(tensor, name, group=members)
    if name == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        return rankwise.all_reduce(tensor, name, group=members)  # a float, which a tensor of integers cannot hold
    return rankwise.all_reduce_(tensor, name, group=members)


def all_gather(tensor: Any, group: Any | None = None) -> Any:  # noqa: ANN401 - Ignite's signature
    """Return every rank's tensor as one tensor, or every rank's number, string or object as a list, by rank.

    Collective over the world, or over `group`: its members call it, and others may.
    Tensors are concatenated along their first dimension, in which they may differ. Alone, a tensor is returned
    unchanged (on an XLA device with a first dimension), and any other value in a list; outside of the group, every
    value is returned unchanged.

    Args:
        tensor: This rank's tensor, or any value that can be pickled.
        group: A process group, or a list of ranks.

    Raises:
        InvalidArgumentError: There is no such group.
        PayloadTypeError: The value cannot be pickled.
        MismatchError: The tensors cannot be concatenated, or another rank calls another collective.
        RemoteRankError: Another rank raised before it took part.
        CollectiveError: A rank ended, or did not arrive in time.

    Example:
        >>> all_gather("héllo")
        ['héllo']
    """
    session = joined_session()
    if session is None:
        if not isinstance(tensor, torch.Tensor):
            return [tensor]
        return torch.atleast_1d(tensor) if model_name() == XLA else tensor
    members = member_group(session, group)
    if members is None:
        return tensor
    if isinstance(tensor, torch.Tensor):
        return rankwise.all_gather_cat(tensor, group=members)
    return rankwise.all_gather(tensor, group=members)


def all_gather_tensors_with_shapes(
    tensor: torch.Tensor,
    shapes: Sequence[Sequence[int]],
    group: Any | None = None,  # noqa: ANN401 - Ignite's signature
) -> list[torch.Tensor]:
    """Return the tensors of all ranks, of any shapes, by rank; alone, and outside of the group, this rank's only.

    Collective over the world, or over `group`: its members call it, and others may.

    Args:
        tensor: This rank's tensor.
        shapes: The shape of every rank's tensor, the same on all ranks. rankwise checks them, and does not need them.
        group: A process group, or a list of ranks.

    Raises:
        InvalidArgumentError: A tensor's shape differs from the one in `shapes`, or there is no such group.
        PayloadTypeError: The value is not a tensor.
        RemoteRankError: Another rank raised before it took part.
        CollectiveError: A rank ended, or did not arrive in time.

    Example:
        >>> all_gather_tensors_with_shapes(torch.ones(2), [[2]])
        [tensor([1., 1.])]
    """
    session = joined_session()
    members = None if session is None else member_group(session, group)
    if not isinstance(tensor, torch.Tensor):
        fail_unsupported_type(members, "all_gather_tensors_with_shapes", tensor)
    if members is None:
        if session is None:
            _check_shapes(tensor, 0, shapes, 1)
        return [tensor]
    with collective("all_gather_tensors_with_shapes", group=members) as checked:
        checked.settings = {"shapes": _check_shapes(tensor, checked.rank, shapes, checked.size)}
        checked.verify()
    return rankwise.all_gather(tensor.detach(), group=members)


def broadcast(tensor: Any, src: int = 0, safe_mode: bool = False) -> Any:  # noqa: ANN401 - Ignite's signature
    """Return one rank's tensor, number, string or path on all ranks; alone, the argument itself.

    Collective over the world. Numbers keep their type and value. A tensor is received into the one that is passed.

    Args:
        tensor: On `src`, the value to send; on other ranks a value of the same type, and a tensor of the same shape.
        src: The rank that sends its value.
        safe_mode: On other ranks the value is ignored, and may be None.

    Raises:
        InvalidArgumentError: The value is None where that is not allowed, or there is no such rank.
        PayloadTypeError: The value has another type.
        MismatchError: The types or shapes differ, without `safe_mode`; or another rank calls another collective.
        RemoteRankError: Another rank raised before it took part.
        CollectiveError: A rank ended, or did not arrive in time.

    Example:
        >>> broadcast(123456789)
        123456789
    """
    session = joined_session()
    if session is None:
        _check_payload(tensor, is_src=True, safe_mode=safe_mode)
        return tensor
    world = world_group(session)
    with collective("broadcast", settings={"src": src, "safe_mode": safe_mode}, group=world) as members:
        is_src = as_integer(src, "src") == session.rank
        if not 0 <= src < members.size:
            raise InvalidArgumentError(f"src={src} is not a member: the group has ranks 0 to {members.size - 1}")
        _check_payload(tensor, is_src=is_src, safe_mode=safe_mode)
        if not safe_mode:
            members.values = {"": _kind(tensor)}
            members.verify()
    own = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
    value = rankwise.broadcast(own if is_src else None, src=src, group=world)
    if is_src:
        return tensor
    if safe_mode or not isinstance(tensor, torch.Tensor):
        return value
    tensor.detach().copy_(cast("torch.Tensor", value))
    return tensor


def barrier() -> None:
    """Wait until every rank has entered the barrier.

    Collective over the world.

    Raises:
        CollectiveError: A rank ended, or did not arrive in time.
        MismatchError: Another rank calls another collective.

    Example:
        >>> barrier()
    """
    session = joined_session()
    if session is not None:
        rankwise.barrier(group=world_group(session))


def _reduce_bits(value: Any, op: str, group: Group | ProcessGroup) -> Any:  # noqa: ANN401 - a tensor or a number
    """Reduce integers bit by bit. Few backends support that, so the values are gathered and reduced here."""
    is_tensor = isinstance(value, torch.Tensor)
    with collective("all_reduce", settings={"op": op}, values={"": describe(value)}, group=group) as members:
        if is_tensor and (value.is_floating_point() or value.is_complex()):
            raise PayloadTypeError(f"op={op!r} is for bools and integers, got {value.dtype}; compare first")
        if not is_tensor and not isinstance(value, Integral):
            raise PayloadTypeError(f"op={op!r} is for bools and integers, got {value!r}; compare first")
        members.verify()
    reduced = functools.reduce(_BITWISE[op], rankwise.all_gather(value, group=group))
    return value.copy_(reduced) if is_tensor else reduced


def _check_shapes(tensor: torch.Tensor, me: int, shapes: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Return the shapes of all ranks' tensors, once their number and this rank's own are checked.

    Raises:
        InvalidArgumentError: The number or this rank's shape is wrong.
    """
    listed = [[int(length) for length in shape] for shape in shapes]
    if len(listed) != size:
        raise InvalidArgumentError(f"shapes has {len(listed)} shapes, but there are {size} ranks")
    if listed[me] != list(tensor.shape):
        raise InvalidArgumentError(f"shapes has {listed[me]} for rank {me}, whose tensor has {list(tensor.shape)}")
    return listed


def _check_payload(value: object, *, is_src: bool, safe_mode: bool) -> None:
    if value is None and is_src:
        raise InvalidArgumentError("Source data can not be None: src sends a tensor, a number, a string or a path")
    if safe_mode and not is_src:
        return
    if value is None:
        raise InvalidArgumentError(
            "Argument safe_mode should be True, on all ranks, if None is passed for non src rank; else pass something "
            "of the kind that src sends"
        )
    if not isinstance(value, (torch.Tensor, Number, str, Path)):
        fail_unsupported_type(None, "broadcast", value)


def _kind(value: object) -> str:
    """Return the description of a value that must be equal on all ranks, for a value to be received into another."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Number):
        return "a number"
    return "a path" if isinstance(value, Path) else "a string"
