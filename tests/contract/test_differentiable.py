"""One body for every world: one rule for `differentiable=True`, and results that can be used as any other tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.autograd import forward_ad

import rankwise as rw
from rankwise._comm.group import Group
from tests.tables import each_row

pytestmark = [
    pytest.mark.ranks("serial", 1, 2, 3),
    pytest.mark.usefixtures("torch_random"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # torch's own use of it in forward mode
]

# Each returns a tensor.
COLLECTIVES: dict[str, Callable[[Any], torch.Tensor]] = {
    "all_reduce": partial(rw.all_reduce, differentiable=True),
    "all_reduce of a tree": lambda x: rw.all_reduce({"x": x, "n": 1, "none": None}, differentiable=True)["x"],
    "all_gather": lambda x: rw.all_gather(x, differentiable=True)[0],
    "all_gather_cat": partial(rw.all_gather_cat, differentiable=True),
}


@each_row("length", [3, 5000], collective=True)
@each_row("name", COLLECTIVES, collective=True)
def test_results_can_be_written_to(comm: Group, name: str, length: int) -> None:
    weight = torch.full((length,), -1.0, requires_grad=True)
    found = COLLECTIVES[name](weight * 1)
    F.relu(found, inplace=True).sum().backward()
    assert not found.detach().any()
    assert weight.grad is not None
    assert not weight.grad.any()

    weight = torch.ones(length, requires_grad=True)
    found = COLLECTIVES[name](weight * 1)
    found.mul_(2)
    found[0] = 0
    found.sum().backward()
    assert weight.grad is not None
    assert weight.grad[-1].item() == (2 * comm.size if rw.get_rank() == 0 or name != "all_gather" else 0)


@each_row("length", [3, 5000], collective=True)
def test_gradients_of_weighted_means(comm: Group, length: int) -> None:
    """They are those of the formula; zeros, and not missing, where the weight is 0."""
    rank = rw.get_rank()
    weights = [2.0 if other == 0 else float(other - 1) for other in range(comm.size)]
    values = [torch.full((length,), 1.0 + other, requires_grad=True) for other in range(comm.size)]
    wanted = torch.stack([weight * value for weight, value in zip(weights, values, strict=True)]).sum(0) / sum(weights)
    wanted.square().sum().mul(comm.size).backward()  # every rank has such a loss
    own = torch.full((length,), 1.0 + rank, requires_grad=True)
    found = rw.all_reduce(own, op="mean", weight=weights[rank], differentiable=True)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    torch.testing.assert_close(own.grad, values[rank].grad)
    with pytest.raises(rw.PayloadTypeError, match=r"tensors of floats, got torch\.int64"):
        rw.all_reduce(torch.ones(length).long(), op="mean", weight=1, differentiable=True)


@each_row("length", [3, 5000], collective=True)
@each_row("name", COLLECTIVES, collective=True)
def test_results_require_a_gradient_on_all_ranks_if_any_input_does(comm: Group, name: str, length: int) -> None:
    """As embeddings where one rank has none, and passes a constant: its backward takes part in those of the others."""
    call, is_first = COLLECTIVES[name], rw.get_rank() == 0
    weight = torch.ones(length, requires_grad=is_first)
    found = call(weight * 2)
    assert found.requires_grad
    found.square().sum().backward()
    assert (weight.grad is not None) == is_first
    assert rw.all_reduce(1) == comm.size, "no rank waits"
    assert not call(torch.ones(length)).requires_grad
    with torch.no_grad():
        assert not call(weight).requires_grad
    with torch.set_grad_enabled(not is_first):
        assert not call(weight).requires_grad, "the only rank that could has turned it off"


@each_row("name", COLLECTIVES, collective=True)
def test_gradients_need_floats_or_complex_numbers(comm: Group, name: str) -> None:
    call = COLLECTIVES[name]
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        value = torch.ones(3, dtype=dtype, requires_grad=True)
        result = call(value)
        (result.real if dtype.is_complex else result).sum().backward()
        assert value.grad is not None
        assert value.grad.dtype == dtype
        if name == "all_gather":
            assert value.grad.real.sum().item() == (3 * comm.size if rw.get_rank() == 0 else 0)
        else:
            assert value.grad.real.sum().item() == pytest.approx(3 * comm.size)
    for odd in (
        torch.ones(3).int(),
        torch.ones(3).bool(),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(3).to_sparse(),
        1.5,
        np.ones(3),
        None,
        "text",
    ):
        with pytest.raises(rw.PayloadTypeError):
            call(odd)
            pytest.fail(f"{odd}")
        assert rw.all_reduce(1) == comm.size


@pytest.mark.parametrize("differentiable", [True, False])
def test_transforms_of_functions_are_refused(comm: Group, *, differentiable: bool) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce": partial(rw.all_reduce, differentiable=differentiable),
        "all_gather": lambda x: rw.all_gather(x, differentiable=differentiable)[0],
        "all_gather_cat": partial(rw.all_gather_cat, differentiable=differentiable),
    }
    if not differentiable:
        calls |= {
            "all_reduce_": rw.all_reduce_,
            "reduce_scatter": lambda x: rw.reduce_scatter([x] * comm.size),
            "gather": lambda x: rw.gather(x) or x,
            "all_gather of a dict": lambda x: rw.all_gather({"x": x})[0]["x"],
            "sync_params": lambda x: rw.sync_params(holding(x)),
        }
    for name, call in calls.items():
        for transform in (
            torch.func.vmap(call),
            torch.func.grad(lambda x, call=call: call(x).sum()),
            torch.func.jacrev(call),
            torch.func.jacfwd(call),
            lambda x, call=call: torch.func.jvp(call, (x,), (x,)),
            lambda x, call=call: torch.func.functionalize(call)(x),
        ):
            with pytest.raises(rw.PayloadTypeError, match=r"torch\.func"):
                transform(torch.ones(2))
                pytest.fail(name)
            assert rw.all_reduce(1) == comm.size


def holding(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("odd", tensor)
    return module


def test_tangents_are_refused_where_they_would_be_lost(comm: Group) -> None:
    for call in COLLECTIVES.values():
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
            with pytest.raises(rw.PayloadTypeError, match="forward-mode"):
                call(dual)
            detached = rw.all_reduce(dual)
            assert forward_ad.unpack_dual(detached).tangent is None, "as the gradient, without differentiable=True"
            assert detached.tolist() == [comm.size] * 3
        assert rw.all_reduce(1) == comm.size
