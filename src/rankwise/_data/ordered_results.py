"""Results of all ranks in the order of the dataset, each exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

import torch

from rankwise._arguments import as_integer
from rankwise._collectives.gathering import gather_values
from rankwise._collectives.groups import comm_of
from rankwise._collectives.numpy_arrays import is_array
from rankwise._collectives.pytree import describe
from rankwise._comm.dense_tensors import dense
from rankwise._text import ranks_by_value, ranks_text
from rankwise.errors import InvalidArgumentError, MismatchError, PayloadTypeError, shown

T = TypeVar("T")

_MOST_SHOWN: Final = 10


@overload
def in_order(indices: torch.Tensor | Iterable[int], values: torch.Tensor, *, total: int) -> torch.Tensor: ...
@overload
def in_order(indices: torch.Tensor | Iterable[int], values: Sequence[T], *, total: int) -> list[T]: ...
def in_order(indices: Any, values: Any, *, total: int) -> Any:
    """Return the results of all ranks in the order of the dataset, each exactly once.

    Collective over the session. Ranks may have different numbers of results, and none. A metric of the result is that
    of one process: no sample counts twice, and sums have one order.

    Args:
        indices: The index in the dataset of each of this rank's results: a tensor of integers, of shape [n], or a
            sequence of integers.
        values: This rank's results: a tensor of shape [n, ...], of the same dtype and shape on all ranks except for n;
            or a sequence of n objects that can be pickled. What a rank without results passes does not matter.
        total: The number of results of all ranks together, such as `len(dataset)`.

    Returns:
        The results 0 to `total` - 1 on every rank: a tensor of shape [total, ...], on this rank's device if those
        passed are on a device of its type; or a list. Tensors are detached.

    Raises:
        InvalidArgumentError: The indices are not integers, or not as many as values, or `total` is not a number of
            results. On all ranks alike: indices are out of range, there twice, or missing.
        PayloadTypeError: The values are neither a dense tensor nor a sequence, or cannot be pickled.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: Some ranks pass tensors, and others objects; the tensors differ in dtype or shape; or another
            rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise, torch
        >>> mine = torch.tensor(rankwise.data.shard([3, 0, 1, 2]))  # on 2 ranks, rank 1: tensor([0, 2])
        >>> rankwise.data.in_order(mine, mine * 0.5, total=4)
        tensor([0.0000, 0.5000, 1.0000, 1.5000])
        >>> rankwise.data.in_order([1, 0], ["b", "a"], total=2)  # on one rank
        ['a', 'b']
    """
    comm = comm_of(None)
    with comm.call("in_order") as call:
        number = as_integer(total, "total")
        if number < 0:
            raise InvalidArgumentError(f"total={shown(total)} is below 0")
        call.settings = {"total": number}
        own_indices, own_values = _indices(indices), _values(values)
        if len(own_indices) != len(own_values):
            raise InvalidArgumentError(f"in_order got {len(own_indices)} indices and {len(own_values)} values")
    gathered = gather_values(comm, call, (own_indices, own_values))
    parts = {rank: part for rank, part in zip(comm.ranks, gathered, strict=True) if len(part[0])}
    _require_each_once({rank: found for rank, (found, _) in parts.items()}, number)
    kinds = [_kind(found) for _, found in parts.values()]
    if len(set(kinds)) > 1:
        raise MismatchError(f"in_order got different values: {ranks_by_value([*parts], kinds)}")
    return _placed([*parts.values()] or [(own_indices, own_values)], number)


def _indices(indices: Any) -> torch.Tensor:  # noqa: ANN401 - an argument of the user
    """Return indices as a tensor of 64-bit integers on the CPU."""
    if not isinstance(indices, torch.Tensor):
        if not isinstance(indices, Iterable):
            raise InvalidArgumentError(f"in_order takes a tensor or a sequence of indices, got {shown(indices)}")
        numbers = [as_integer(index, "an index of in_order") for index in indices]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    is_of_others = indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool
    if indices.dim() != 1 or (is_of_others and len(indices)):  # torch makes an empty tensor one of floats
        raise InvalidArgumentError(f"in_order takes indices of shape [n] that are integers, got {describe(indices)}")
    return dense(indices).to("cpu", torch.int64)


def _values(values: Any) -> torch.Tensor | list[Any]:  # noqa: ANN401 - an argument of the user
    if isinstance(values, torch.Tensor) and values.dim():
        return dense(values).detach()
    if is_array(values) or (isinstance(values, Sequence) and not isinstance(values, (str, bytes))):
        return list(values)
    raise PayloadTypeError(
        f"in_order takes a tensor of shape [n, ...], or a sequence of n objects, got {describe(values)}"
    )


def _kind(values: torch.Tensor | list[Any]) -> str:
    if isinstance(values, torch.Tensor):
        return f"{values.dtype} {['n', *values.shape[1:]]}".replace("'", "")
    return "a sequence of objects"


def _require_each_once(indices_of: Mapping[int, torch.Tensor], total: int) -> None:
    """Check that the indices of all ranks are 0 to `total` - 1, each once; every rank has those of all.

    Raises:
        InvalidArgumentError: They are not; the message has the first of each fault.
    """
    found = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *indices_of.values()])
    is_inside = (found >= 0) & (found < total)
    counts = torch.bincount(found[is_inside], minlength=total)
    faults = {
        "out of range": (found[~is_inside].unique(), True),
        "there more than once": ((counts > 1).nonzero().view(-1), True),
        "missing": ((counts == 0).nonzero().view(-1), False),
    }
    texts = []
    for fault, (indices, is_somewhere) in faults.items():
        if len(indices):
            first = indices[:_MOST_SHOWN].tolist()
            named = [f"{index} on {_holders(index, indices_of)}" if is_somewhere else str(index) for index in first]
            more = f" and {len(indices) - len(first)} more" if len(indices) > len(first) else ""
            texts.append(f"{fault}: {', '.join(named)}{more}")
    if texts:
        raise InvalidArgumentError(
            f"in_order takes each index of 0 to {total - 1} once, from all ranks together; {'; '.join(texts)}"
        )


def _holders(index: int, indices_of: Mapping[int, torch.Tensor]) -> str:
    return ranks_text([rank for rank, indices in indices_of.items() if bool((indices == index).any())])


def _placed(parts: Sequence[tuple[torch.Tensor, Any]], total: int) -> torch.Tensor | list[Any]:
    """Return the values of all parts at their indices, which are complete."""
    first = parts[0][1]
    if isinstance(first, torch.Tensor):
        placed = first.new_empty((total, *first.shape[1:]))
        for indices, values in parts:
            placed[indices.to(placed.device)] = values
        return placed
    found = {index: value for indices, values in parts for index, value in zip(indices.tolist(), values, strict=True)}
    return [found[index] for index in range(total)]
