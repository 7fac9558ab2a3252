"""Values through vis4d's names arrive as pickle would have them, bit by bit, from the strides to the class."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise._comm.group import Group
from rankwise.compat import vis4d


def _attributed() -> torch.Tensor:
    tensor = torch.arange(6.0)[::2]
    tensor.kind = "boxes"  # type: ignore[attr-defined]  # which is the point
    return tensor


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "slice": lambda: torch.arange(24.0).view(4, 6)[1:, ::2],
    "column": lambda: torch.arange(12).view(3, 4)[:, 1],
    "large slice": lambda: torch.arange(20000).view(100, 200)[:, 3:150:2],
    "diagonal": lambda: torch.eye(5).diagonal(),
    "expanded": lambda: torch.arange(3.0).view(3, 1).expand(3, 4),
    "overlapping": lambda: torch.arange(10).unfold(0, 4, 2),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "no dimensions": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0, 6)[:, ::2],
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "gradient": lambda: torch.ones(3, 4, requires_grad=True)[:, ::2] * 2,
    "parameter": lambda: nn.Parameter(torch.arange(24.0).view(4, 6)[:, ::2]),
    "frozen parameter": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "attribute": _attributed,
}


def facts(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the observable properties of a tensor."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    bits = tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, tensor.is_leaf
    return type(tensor), tensor.dtype, strides, bits, repr(tensor), tensor.__dict__


def everyones(value: Any) -> list[Any]:
    """Return the values that a rank receives by each of the functions."""
    arrived = [vis4d.broadcast(value if vis4d.get_rank() == src else None, src=src) for src in (0, 1)]
    for gather in (vis4d.all_gather_object_gpu, vis4d.all_gather_object_cpu):
        arrived += gather(value, rank_zero_return_only=False) or []
        arrived += gather(value) or []
    return arrived


@pytest.mark.ranks(2)
def test_tensors_arrive_as_pickle_has_them(comm: Group) -> None:
    """A slice has the strides of its clone when rankwise's own collectives return it."""
    for name, make in TENSORS.items():
        wanted = facts(pickle.loads(pickle.dumps(make())))
        sent = vis4d.get_rank()  # the one that broadcasts keeps its own, as in the original
        arrived = everyones(make())
        assert [facts(tensor) for tensor in arrived[:sent] + arrived[sent + 1 :]] == [wanted] * (len(arrived) - 1), name


@pytest.mark.ranks(2)
def test_tensors_of_one_value_have_memory_of_their_own(comm: Group) -> None:
    whole = torch.arange(4000.0)
    for first, second, again in everyones([whole[:2000], whole[1000:], whole[:2000]])[2:]:
        first[1500] = -1.0
        assert second[500].item() == 1500.0
        assert again[1500].item() == 1500.0
    twice = everyones([whole] * 2)[2:]
    assert all(first is second for first, second in twice)


@pytest.mark.ranks(2)
def test_no_more_of_a_large_tensor_travels_than_is_between_the_ends(comm: Group) -> None:
    """The original sends all of a batch for one of its images."""
    row = vis4d.all_gather_object_gpu(torch.ones(1000, 1000)[5], rank_zero_return_only=False)
    assert row is not None
    assert [tensor.untyped_storage().nbytes() for tensor in row] == [4000, 4000]


@pytest.mark.ranks(2)
def test_arrays_can_be_written_to(comm: Group) -> None:
    """An image that was read is read-only, and stays so in rankwise's own collectives."""
    for size in (2, 2000):
        image = np.ones((size, 3))
        image.flags.writeable = False
        arrived = everyones(image)
        del arrived[vis4d.get_rank()]
        assert all(other.flags.writeable and (other == image).all() for other in arrived)


@pytest.mark.ranks(2)
def test_a_class_of_the_script_is_the_one_of_that_name(comm: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where ranks define it differently, as with a default that is a rank."""

    class Detection:
        __module__ = "__main__"
        __qualname__ = "Detection"

        def label(self, rank: int = comm.rank or 0) -> int:
            return rank

        label.__qualname__ = "Detection.label"

    monkeypatch.setattr(sys.modules["__main__"], "Detection", Detection, raising=False)
    assert [type(other) for other in everyones(Detection())] == [Detection] * (6 if comm.rank else 10)


@pytest.mark.ranks(2)
def test_what_pickle_refuses_travels_if_rankwise_can_carry_it(comm: Group) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):  # the second from Python 3.14 on
        pickle.dumps(lambda: 7)
    assert [function() for function in everyones(lambda: 7)] == [7] * (6 if comm.rank else 10)
    for gather in (vis4d.all_gather_object_gpu, vis4d.all_gather_object_cpu, vis4d.broadcast):
        value = (one for one in [1]) if comm.rank == 0 else 1
        with pytest.raises(
            rw.RemoteRankError if comm.rank else rw.PayloadTypeError, match="a generator cannot be sent"
        ):
            gather(value)
    assert rw.all_reduce(1) == 2
