"""Random values, and random differences of one rank, compared with a simple model.

Every rank draws the same examples, since nothing that hypothesis does depends on more than the body and what it saw.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankwise as rw
from rankwise._comm.group import Group
from tests.contract import random_values as model

pytestmark = [pytest.mark.ranks("serial", 2, 3), pytest.mark.soak(50)]


def test_all_reduce_of_random_values(comm: Group, seed: int) -> None:
    @hypothesis.seed(seed)
    @model.EXAMPLES
    @given(model.templates, st.sampled_from(["sum", "product"]))
    def check(template: Any, op: str) -> None:
        value = model.made(template, rw.get_rank())
        found = rw.all_reduce(value, op=op)
        wanted = model.reduced(template, comm.size, operator.add if op == "sum" else operator.mul)
        assert model.same(found, wanted if comm.size > 1 else model.of_one(wanted))

    check()


def test_random_values_are_gathered_unchanged(comm: Group, seed: int) -> None:
    @hypothesis.seed(seed)
    @model.EXAMPLES
    @given(st.lists(model.templates, min_size=comm.size, max_size=comm.size), st.integers(0, comm.size - 1))
    def check(each: list[Any], one: int) -> None:
        rank = rw.get_rank()
        wanted = [model.made(template, other) for other, template in enumerate(each)]
        assert model.same(rw.all_gather(wanted[rank]), wanted)
        gathered = rw.gather(wanted[rank], dst=one)
        assert model.same(gathered, wanted) if rank == one else gathered is None
        assert model.same(rw.broadcast(wanted[rank] if rank == one else None, src=one), wanted[one])
        assert model.same(rw.scatter(wanted if rank == one else None, src=one), wanted[rank])
        assert model.same(rw.all_to_all([wanted[rank]] * comm.size), wanted)

    check()


def test_random_divergences_are_found(comm: Group, seed: int) -> None:
    @hypothesis.seed(seed)
    @model.EXAMPLES
    @given(st.data())
    def check(data: st.DataObject) -> None:
        template = data.draw(model.templates.filter(model.paths))
        path = data.draw(st.sampled_from(model.paths(template)))
        leaf = data.draw(model.templates)
        odd = data.draw(st.integers(0, comm.size - 1))
        other = model.with_other_leaf(template, path, leaf)
        value = model.made(other if rw.get_rank() == odd else template, rw.get_rank())
        old = functools.reduce(lambda tree, key: tree[key], path, template)
        alike = model.paths(leaf) == [()] and model.signature(leaf) == model.signature(old)
        if comm.size == 1 or alike:
            rw.all_reduce(value)
        else:
            with pytest.raises(rw.MismatchError):
                rw.all_reduce(value)
        assert rw.all_reduce(1) == comm.size

    check()
