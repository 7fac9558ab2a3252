"""One rank runs out of memory at any step of a collective: the others raise or return, and the next collective works.

Every step that takes memory for tensors fails once, in its turn, on one rank. No transport, buffer or message is known
here: whatever is done between the agreement of the ranks and the end of the call is among the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import rankwise as rw
from rankwise._comm.group import Group

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usefixtures("torch_random")]

LENGTH = 5000


class OutOfMemory(TorchFunctionMode):
    """Allows a number of operations that allocate memory, and fails the next ones.

    Attributes:
        left: How many more may.
        least: Operations that take fewer bytes always may.
    """

    def __init__(self, left: int, least: int = 0) -> None:
        super().__init__()
        self.left = left
        self.least = least

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith("_c10d_functional."):  # of an XLA device: takes memory only where all ranks execute it
            return result
        if memory(result, self.least) - memory([args, kwargs]):
            if not self.left:
                raise MemoryError("none is left")
            self.left -= 1
        return result


def memory(value: object, least: int = 0) -> set[int]:
    """Return the addresses of the tensors in a value that have at least so many bytes."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.untyped_storage().nbytes() < least:
            return set()
        # The memory of XLA devices has no address: there, the storage is the identity.
        storage = value.untyped_storage()
        return {storage._cdata if value.device.type == "xla" else storage.data_ptr()} - {0}
    if isinstance(value, Mapping):
        value = list(value.values())
    return set().union(*(memory(part, least) for part in value)) if isinstance(value, (list, tuple)) else set()


def trained(*, sparse: bool = False) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.ones(LENGTH)), torch.nn.Parameter(torch.ones(3, dtype=torch.float16))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if sparse and rw.get_rank() % 2:
        parameters[0].grad = torch.eye(LENGTH, 1).reshape(-1).to_sparse()
    return parameters


def ragged() -> torch.Tensor:
    return torch.ones(LENGTH + rw.get_rank())


# A function that makes a value, and a call with it.
COLLECTIVES: dict[str, tuple[Callable[[Group], Any], Callable[[Any], object]]] = {
    "all_reduce": (lambda _: torch.ones(LENGTH), lambda value: rw.all_reduce(value, op="max")),
    "all_reduce of little": (lambda _: [torch.ones(3), 1], rw.all_reduce),
    "all_reduce of a tree": (
        lambda _: {"a": [torch.ones(LENGTH), torch.ones(3, dtype=torch.int64)]},
        lambda value: rw.all_reduce(value, op="mean"),
    ),
    "all_reduce of complex numbers": (
        lambda _: torch.ones(LENGTH, dtype=torch.complex64),
        lambda value: rw.all_reduce(value, op="product"),
    ),
    "all_reduce_": (lambda _: torch.ones(LENGTH), rw.all_reduce_),
    "all_reduce_ of a transpose": (lambda _: torch.ones(50, 100).t(), lambda value: rw.all_reduce_(value, op="mean")),
    "reduce_scatter": (lambda comm: [torch.ones(LENGTH)] * comm.size, lambda value: rw.reduce_scatter(value, op="min")),
    "reduce_scatter of pieces": (
        lambda comm: [torch.ones(LENGTH + place) for place in range(comm.size)],
        rw.reduce_scatter,
    ),
    "all_gather": (lambda _: torch.ones(LENGTH), rw.all_gather),
    "all_gather of others": (lambda _: {"a": ragged(), "b": "text" * LENGTH}, rw.all_gather),
    "all_gather_cat": (lambda _: ragged(), rw.all_gather_cat),
    "gather": (lambda _: ragged(), lambda value: rw.gather(value, dst=1)),
    "gather of one": (lambda _: torch.ones(LENGTH if rw.get_rank() else 1), rw.gather),
    "broadcast": (lambda _: [torch.ones(LENGTH), "text"], lambda value: rw.broadcast(value, src=1)),
    "scatter": (
        lambda comm: [torch.ones(LENGTH + place) for place in range(comm.size)],
        lambda value: rw.scatter(value, src=1),
    ),
    "reduce": (lambda _: torch.ones(LENGTH), lambda value: rw.reduce(value, dst=1)),
    "reduce of a tree": (lambda _: {"a": [torch.ones(LENGTH), torch.ones(3)]}, lambda value: rw.reduce(value, "mean")),
    "all_to_all": (lambda comm: [torch.ones(LENGTH)] * comm.size, rw.all_to_all),
    "all_to_all of others": (
        lambda comm: [{"a": ragged(), "b": "text" * LENGTH}, *[1] * (comm.size - 1)],
        rw.all_to_all,
    ),
    "scatter to one": (lambda comm: [0] * (comm.size - 1) + [torch.ones(LENGTH)], rw.scatter),
    "sync_grads": (lambda _: trained(), rw.sync_grads),
    "sync_grads of sparse ones": (lambda _: trained(sparse=True), rw.sync_grads),
    "sync_params": (lambda _: torch.nn.BatchNorm1d(LENGTH), rw.sync_params),
    "barrier": (lambda _: None, lambda _: rw.barrier()),
}


def attempt(call: Callable[[Any], object], value: object, memory: OutOfMemory | None) -> Exception | None:
    """Return the error that a call raises when so many operations may allocate memory."""
    try:
        with memory or nullcontext():
            call(value)
    except (MemoryError, rw.RankwiseError) as error:
        return error
    return None


@pytest.mark.parametrize("odd", [pytest.param(0, marks=pytest.mark.slow), -1], ids=["first", "last"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_out_of_memory_at_every_step(comm: Group, collective: str, odd: int) -> None:
    make, call = COLLECTIVES[collective]
    odd %= comm.size
    told = []
    for left in range(100):
        error = attempt(call, make(comm), OutOfMemory(left) if rw.get_rank() == odd else None)
        errors = rw.all_gather(error)
        assert all(
            error is None
            # The first where it combines what all have sent.
            or (
                isinstance(error, (rw.CollectiveError, rw.RemoteRankError))
                and "MemoryError: none is left" in str(error)
            )
            for place, error in enumerate(errors)
            if place != odd
        ), errors
        others = {type(error) for place, error in enumerate(errors) if place != odd}
        assert len(others) == 1, "the others are alike"
        told.append(others.pop() is not type(None))
        assert rw.all_reduce(torch.ones(LENGTH)).sum().item() == LENGTH * comm.size, "and the next collective works"
        if errors[odd] is None:
            break
        assert "none is left" in str(errors[odd])
    else:
        pytest.fail("there was never enough memory")
    # Errors after the transfer of data concern this rank alone, and come last.
    assert told == sorted(told, reverse=True)


class TooLarge:
    """A value for whose pickle there is no memory."""

    def __reduce__(self) -> str:
        raise MemoryError("none is left")


def test_out_of_memory_in_pickling_is_no_error_of_the_type(comm: Group) -> None:
    fails = rw.get_rank() == 1
    with pytest.raises(MemoryError if fails else rw.RemoteRankError, match="none is left"):
        rw.all_gather(TooLarge() if fails else 0)
    assert rw.all_reduce(1) == comm.size
