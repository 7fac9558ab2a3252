"""Every collective with every kind of every argument: the documented value or a rankwise error, the same in all worlds.

A test goes through a collective's part of the table inside of the ranks, and reports all that is wrong at once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parameter import is_lazy

import rankwise as rw
from rankwise._comm.comm import serial_comm
from rankwise._comm.group import Group
from tests.contract.argument_kinds import ARRAYS, KINDS, PLAIN, made_of
from tests.contract.random_values import EXAMPLES
from tests.lanes import variants

pytestmark = [
    pytest.mark.usefixtures("torch_random"),
    pytest.mark.filterwarnings("ignore"),  # torch's, of forms that are new or old
]


# Parts of messages that differ between worlds, and between values of a kind.
NUMBERS = re.compile(r"0x[0-9a-f]+|-?[0-9.]+(e-?[0-9]+)?")


class Row(NamedTuple):
    """A collective, and arguments that it takes in a world of any size."""

    call: Callable[..., object]
    arguments: Callable[[int], dict[str, Any]]


def trained() -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    return module


ROWS = {
    "all_reduce": Row(rw.all_reduce, lambda _: {"value": torch.ones(3)}),
    "all_reduce, mean": Row(rw.all_reduce, lambda _: {"value": 1, "op": "mean"}),
    "all_reduce, max": Row(rw.all_reduce, lambda _: {"value": [1], "op": "max"}),
    "all_reduce, and": Row(rw.all_reduce, lambda _: {"value": True, "op": "and"}),
    "all_reduce, differentiable": Row(rw.all_reduce, lambda _: {"value": torch.ones(3), "differentiable": True}),
    "all_reduce_": Row(rw.all_reduce_, lambda _: {"tensor": torch.ones(3)}),
    "reduce": Row(rw.reduce, lambda _: {"value": torch.ones(3)}),
    "reduce, mean": Row(rw.reduce, lambda _: {"value": 1, "op": "mean"}),
    "reduce_scatter": Row(rw.reduce_scatter, lambda size: {"values": [torch.ones(2)] * size}),
    "reduce_scatter of pieces": Row(
        lambda piece, op="sum", group=None: rw.reduce_scatter([piece] * size_of(group), op, group=group),
        lambda _: {"piece": torch.ones(2)},
    ),
    "all_gather": Row(rw.all_gather, lambda _: {"value": "a"}),
    "all_gather, differentiable": Row(rw.all_gather, lambda _: {"value": torch.ones(2), "differentiable": True}),
    "all_gather_cat": Row(rw.all_gather_cat, lambda _: {"tensor": torch.ones(2, 2)}),
    "all_gather_cat, differentiable": Row(
        rw.all_gather_cat, lambda _: {"tensor": torch.ones(2, 2), "differentiable": True}
    ),
    "gather": Row(rw.gather, lambda _: {"value": "a"}),
    "broadcast": Row(rw.broadcast, lambda _: {"value": "a"}),
    "scatter": Row(rw.scatter, lambda size: {"values": ["a"] * size}),
    "scatter of values": Row(
        lambda value, src=0, group=None: rw.scatter([value] * size_of(group), src=src, group=group),
        lambda _: {"value": "a"},
    ),
    "all_to_all": Row(rw.all_to_all, lambda size: {"values": ["a"] * size}),
    "all_to_all of values": Row(
        lambda value, group=None: rw.all_to_all([value] * size_of(group), group=group), lambda _: {"value": "a"}
    ),
    "barrier": Row(rw.barrier, lambda _: {}),
    "sync_grads": Row(rw.sync_grads, lambda _: {"parameters": trained()}),
    "sync_params": Row(rw.sync_params, lambda _: {"module": torch.nn.Linear(2, 2)}),
}


# Those whose first argument is a value.
VALUES = ROWS.keys() - {"barrier"}
# Rows for the value alone.
VARIANTS = {title for title in ROWS if "," in title or " of " in title}
SETTINGS = {
    **PLAIN,
    **ARRAYS,
    **{
        kind: KINDS[kind]
        for kind in (
            "list",
            "dict",
            "tensor",
            "0-d tensor",
            "0-d bool tensor",
            "1-element tensor",
            "meta tensor",
            "fake tensor",
            "tensor without memory",
            "module",
        )
    },
}


def size_of(group: Any) -> int:
    return group.size if isinstance(group, Group) else rw.get_world_size()


def cells(title: str) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a call, with values of every kind for each."""
    value, *settings = inspect.signature(ROWS[title].call).parameters
    if title in VALUES:
        yield from ((value, kind) for kind in KINDS)
    if title in VARIANTS:
        return
    for argument in settings if title in VALUES else (value, *settings):
        for kind in SETTINGS:
            if kind == "one" and argument in {"src", "dst"}:
                continue  # which is a rank in some worlds
            if argument != "timeout" or not is_short(made_of(kind)):
                yield argument, kind


def is_short(timeout: Any) -> bool:
    """Return whether a timeout is so short that it could expire while a rank is not scheduled."""
    try:
        return 0 < float(timeout) < 60
    except Exception:  # noqa: BLE001 - a value may raise any error
        return False


def called(title: str, odd: dict[str, Any], group: Group | None, size: int) -> str:
    """Return a description of the result or error of a call, without the number of ranks."""
    row = ROWS[title]
    return outcome(partial(row.call, **{**row.arguments(size), "group": group, **odd}))


def outcome(call: Callable[[], object]) -> str:
    try:
        result = call()
        return summary(result.wait() if isinstance(result, rw.Work) else result)
    except rw.RankwiseError as error:
        return f"{type(error).__name__}: {NUMBERS.sub('#', str(error).partition(chr(10))[0])}"
    except BaseException as error:  # noqa: BLE001 - the error is the result
        return f"RAW {type(error).__name__}: {str(error)[:150]}"


def summary(value: Any) -> str:
    """Return a description of a value that does not depend on the number of ranks."""
    if isinstance(value, torch.Tensor):
        return f"{type(value).__qualname__} {value.dtype} {value.layout} {value.requires_grad} {dimensions(value)}"
    if isinstance(value, np.ndarray):
        return f"{type(value).__qualname__} {value.dtype} {value.ndim}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__qualname__} of {sorted({str(type(part)) for part in value})}"
    return f"{type(value).__qualname__}"


def dimensions(tensor: torch.Tensor) -> int | None:
    return None if is_lazy(tensor) else tensor.dim()


@pytest.mark.ranks("serial", 2)
@pytest.mark.slow_with_ranks("serial")  # two ranks call each in a group of one, too
@pytest.mark.parametrize("title", variants(ROWS, fast=ROWS.keys() - VARIANTS))
def test_every_kind_of_every_argument(comm: Group, title: str) -> None:
    alone = Group(serial_comm(torch.device("cpu")))
    wrong: list[str] = []
    for argument, kind in cells(title):
        cell = f"{title}({argument}={kind})"
        found = called(title, {argument: made_of(kind)}, None, comm.size)
        if found.startswith("RAW"):
            wrong.append(f"{cell}: {found}")
        elif comm.size > 1 and is_alike(title, argument):
            first = called(title, {"group": alone, argument: made_of(kind)}, alone, 1)
            if found != first:
                wrong.append(f"{cell}\n   alone: {first}\n   of {comm.size}: {found}")
        if outcome(lambda: rw.all_reduce(1) == comm.size or 1 / 0) != "bool":
            pytest.fail(f"{cell}: {found}, and then no collective works")
    assert not wrong, "\n".join(wrong[:20])


def is_alike(title: str, argument: str) -> bool:
    """Return whether a call has the same result in all worlds, and in a group of one.

    Not so if it takes one value for each rank, or is for all ranks.
    """
    if argument in {"group", "values", "overlap"}:
        return False
    return rw.get_rank() == 0 or not re.match(r"(reduce|gather|broadcast|scatter)\b", title)


# Kinds in containers, as templates of which every rank makes its own.
templates = st.recursive(
    st.sampled_from(sorted(KINDS)),
    lambda children: st.one_of(
        st.lists(children, max_size=2),
        st.dictionaries(st.sampled_from(["a", "b", 1]), children, max_size=2),
        st.tuples(children),
    ),
    max_leaves=4,
)


def made(template: Any) -> Any:
    if isinstance(template, dict):
        return {key: made(value) for key, value in template.items()}
    if isinstance(template, (list, tuple)):
        return type(template)(made(value) for value in template)
    return made_of(template)


@pytest.mark.ranks(2, 3)
@pytest.mark.soak(100)
def test_random_arguments_on_some_ranks(comm: Group, seed: int) -> None:
    """Arguments of all kinds, several at once, in containers, on one rank or on all: all ranks return, or all raise."""

    @hypothesis.seed(seed)
    @settings(EXAMPLES, max_examples=60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        title = data.draw(st.sampled_from(sorted(ROWS)))
        names = [name for name in inspect.signature(ROWS[title].call).parameters if name not in {"group", "timeout"}]
        odd = data.draw(st.dictionaries(st.sampled_from(names), templates, min_size=1, max_size=2))
        who = data.draw(st.sets(st.integers(0, comm.size - 1), min_size=1))
        arguments = {name: made(template) for name, template in odd.items()} if rw.get_rank() in who else {}
        found = called(title, arguments, None, comm.size)
        everywhere = rw.all_gather(found)
        assert not [one for one in everywhere if one.startswith("RAW")], (title, odd, who, everywhere)
        assert len({"Error: " in one for one in everywhere}) == 1, (title, odd, who, everywhere)

    check()
