"""Random values, drawn as templates from which every rank makes its own value, and the expected results."""

from __future__ import annotations

import copy
import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = settings(
    max_examples=50, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32)

# A leaf is drawn as a template, from which each rank makes its own value.
numbers = st.tuples(st.just("number"), st.sampled_from([int, float, bool]), st.integers(-4, 4))
tensors = st.tuples(
    st.just("tensor"), st.sampled_from(DTYPES), st.lists(st.sampled_from([0, 1, 3, 40]), max_size=3).map(tuple)
)
leaves = st.one_of(numbers, tensors, st.none())
templates = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "c", 1, 2]), children, max_size=3),
        st.dictionaries(st.sampled_from("xyz"), children, max_size=3).map(OrderedDict),
        st.lists(children, max_size=2).map(lambda items: ("of tuple", items)),
    ),
    max_leaves=8,
)


def made(template: Any, rank: int) -> Any:
    """Return the value of a rank for a template; each rank orders dicts in its own way."""
    if isinstance(template, dict):
        items = list(template.items())
        return type(template)((key, made(value, rank)) for key, value in (items[::-1] if rank % 2 else items))
    if isinstance(template, list):
        return [made(item, rank) for item in template]
    if template is None:
        return None
    if template[0] == "of tuple":
        return tuple(made(item, rank) for item in template[1])
    if template[0] == "number":
        _, kind, value = template
        return kind(value + rank)
    _, dtype, shape = template
    return (torch.arange(math.prod(shape)).reshape(shape) + rank).to(dtype)


def reduced(template: Any, size: int, op: Callable[[Any, Any], Any]) -> Any:
    """Return the expected reduction."""
    if isinstance(template, dict):
        return {key: reduced(value, size, op) for key, value in template.items()}
    if isinstance(template, list):
        return [reduced(item, size, op) for item in template]
    if template is None:
        return None
    if template[0] == "of tuple":
        return tuple(reduced(item, size, op) for item in template[1])
    return functools.reduce(op, [made(template, rank) for rank in range(size)])


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    return found is None if wanted is None else bool(found == wanted)


def paths(template: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of the leaves."""
    if isinstance(template, (dict, list)):
        items = template.items() if isinstance(template, dict) else enumerate(template)
        return [path for key, value in items for path in paths(value, (*above, key))]
    if template is not None and template[0] == "of tuple":
        return paths(template[1], (*above, 1))
    return [above]


def with_other_leaf(template: Any, path: tuple[Any, ...], leaf: Any) -> Any:
    if not path:
        return leaf
    if isinstance(template, tuple):
        return ("of tuple", with_other_leaf(template[1], path[1:], leaf))
    changed = copy.copy(template)
    changed[path[0]] = with_other_leaf(template[path[0]], path[1:], leaf)
    return changed


def signature(leaf: Any) -> Any:
    return leaf if leaf is None or leaf[0] == "tensor" else "number"


def of_one(value: Any) -> Any:
    """The sum of one bool is an integer too."""
    if isinstance(value, dict):
        return {key: of_one(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(of_one, value))
    return int(value) if isinstance(value, bool) else value
