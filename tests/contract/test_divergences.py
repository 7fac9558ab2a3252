"""One rank diverges from the others: every rank raises the right error, and the next collective works.

A rank that hangs or aborts ends its test after `ranks_timeout`. In the plugin's worlds a collective waits as long as
that, so an error that is raised here has not waited for a timeout.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group

pytestmark = pytest.mark.ranks(2, 4)

T = TypeVar("T")

Talk = Callable[[Group], object]

LARGE = 100_000


def cat(*shape: int, dim: int = 0, dtype: torch.dtype = torch.float32) -> Talk:
    return lambda _: rw.all_gather_cat(torch.ones(shape, dtype=dtype), dim=dim)


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def reduce(value: Any, op: str = "sum", **more: Any) -> Talk:
    return lambda _: rw.all_reduce(value, op=op, **more)


def with_turn(comm: Group) -> None:
    with rw.rank_zero_first():
        pass


def in_order(comm: Group) -> None:
    with rw.in_rank_order():
        pass


def on_rank(rank: int) -> Talk:
    return lambda _: rw.one_rank_only(rank)(lambda: 5)()


OPERATIONS: dict[str, Talk] = {
    "all_reduce": reduce(1),
    "all_reduce of a tensor": reduce(torch.ones(3)),
    "all_reduce of much": reduce(torch.ones(LARGE)),
    "all_reduce_": lambda _: rw.all_reduce_(torch.ones(3)),
    "all_gather": lambda _: rw.all_gather("text"),
    "all_gather of much": lambda _: rw.all_gather(torch.ones(LARGE)),
    "all_gather_cat": cat(2),
    "gather": lambda _: rw.gather(1),
    "broadcast": lambda _: rw.broadcast(1),
    "scatter": lambda comm: rw.scatter([1] * comm.size),
    "reduce": lambda _: rw.reduce(1),
    "reduce of much": lambda _: rw.reduce(torch.ones(LARGE)),
    "all_to_all": lambda comm: rw.all_to_all([1] * comm.size),
    "all_to_all of much": lambda comm: rw.all_to_all([torch.ones(LARGE)] * comm.size),
    "reduce_scatter": lambda comm: rw.reduce_scatter([torch.ones(2)] * comm.size),
    "barrier": lambda _: rw.barrier(),
    "new_group": lambda _: rw.new_group([0]),
    "sync_grads": lambda _: rw.sync_grads(parameters((2,))),
    "sync_params": lambda _: rw.sync_params(torch.nn.BatchNorm1d(2)),
    "rank_zero_first": with_turn,
    "in_rank_order": in_order,
    "one_rank_only": on_rank(0),
}

# The call of most ranks, the call of one rank, and the message.
MISMATCHES: dict[str, tuple[Talk, Talk, str]] = {
    "op": (reduce(1), reduce(1, "mean"), "op='sum'.*op='mean'"),
    "op of a tensor": (reduce(torch.ones(LARGE)), reduce(torch.ones(LARGE), "max"), "op='sum'.*op='max'"),
    "shape": (reduce(torch.ones(3)), reduce(torch.ones(4)), r"float32\[3\] on cpu.*float32\[4\]"),
    "dimensions": (reduce(torch.ones(4)), reduce(torch.ones(2, 2)), r"float32\[4\] on cpu.*float32\[2, 2\]"),
    "shape of much": (reduce(torch.ones(LARGE)), reduce(torch.ones(LARGE + 1)), r"\[100000\].*\[100001\]"),
    "much and little": (reduce(torch.ones(LARGE)), reduce(torch.ones(1)), r"\[100000\].*\[1\]"),
    "type": (reduce(torch.ones(3)), reduce(torch.ones(3).double()), "float32.*float64"),
    "type of much": (reduce(torch.ones(LARGE)), reduce(torch.ones(LARGE).half()), "float32.*float16"),
    "tensor and number": (reduce(torch.tensor(1)), reduce(1), "int64.* on cpu.*a number"),
    "number and None": (reduce([1, 1]), reduce([1, None]), r"\[1\] is .*a number.*None"),
    "a key is missing": (reduce({"a": 1, "b": 1}), reduce({"a": 1}), r"\['b'\] is .*nothing"),
    "another key": (reduce({"a": 1}), reduce({"b": 1}), r"\['[ab]'\] is .*a number on.*nothing on"),
    "a key of an OrderedDict": (
        reduce(OrderedDict(b=1, a=torch.ones(2))),
        reduce(OrderedDict(a=torch.ones(3), b=1)),
        r"\['a'\] is .*float32\[2\].*float32\[3\]",
    ),
    "length of a list": (reduce([1, 1]), reduce([1, 1, 1]), r"\[2\] is .*nothing on.*a number on"),
    "list and tuple": (reduce([1, 1]), reduce((1, 1)), r"the value is .*a list on.*a tuple on"),
    "a value and a list": (reduce(1), reduce([1]), r"the value is .*a list on.*a number on"),
    "dict and OrderedDict": (
        reduce({"x": {"a": 1}}),
        reduce({"x": OrderedDict(a=1)}),
        r"\['x'\] is .*a dict on.*an OrderedDict on",
    ),
    "depth": (reduce({"a": [1]}), reduce({"a": 1}), r"\['a'\] is .*a number on.*a list on"),
    "shape deep in a tree": (
        reduce({"a": {"b": [torch.ones(2), 1]}}),
        reduce({"a": {"b": [torch.ones(2, 1), 1]}}),
        r"\['a'\]\['b'\]\[0\] is .*float32\[2\].*float32\[2, 1\]",
    ),
    "differentiable": (reduce(torch.ones(3)), reduce(torch.ones(3), differentiable=True), "differentiable=True"),
    "src of broadcast": (lambda _: rw.broadcast(1, src=0), lambda _: rw.broadcast(1, src=1), "src=0.*src=1"),
    "src of scatter": (
        lambda comm: rw.scatter([1] * comm.size, src=0),
        lambda comm: rw.scatter([1] * comm.size, src=1),
        "src=0.*src=1",
    ),
    "src of sync_params": (
        lambda _: rw.sync_params(torch.nn.BatchNorm1d(2), src=0),
        lambda _: rw.sync_params(torch.nn.BatchNorm1d(2), src=1),
        "src=0.*src=1",
    ),
    "dst": (lambda _: rw.gather(1, dst=0), lambda _: rw.gather(1, dst=1), "dst=0.*dst=1"),
    "dst of reduce": (lambda _: rw.reduce(1, dst=0), lambda _: rw.reduce(1, dst=1), "dst=0.*dst=1"),
    "op of reduce": (lambda _: rw.reduce(1), lambda _: rw.reduce(1, "max"), "op='sum'.*op='max'"),
    "shape of reduce": (
        lambda _: rw.reduce(torch.ones(LARGE)),
        lambda _: rw.reduce(torch.ones(LARGE + 1)),
        r"\[100000\].*\[100001\]",
    ),
    "reduce and all_reduce": (lambda _: rw.reduce(1), reduce(1), r"reduce\(op='sum', dst=0\).*all_reduce\(op='sum'\)"),
    "dim": (cat(2, 2, dim=0), cat(2, 2, dim=1), "dim=0.*dim=1"),
    "type of all_gather_cat": (cat(2), cat(2, dtype=torch.int32), "float32.*int32"),
    "other dimensions of all_gather_cat": (cat(2, 3), cat(2, 4), r"\[2, 3\].*\[2, 4\]"),
    "name of a barrier": (lambda _: rw.barrier("a"), lambda _: rw.barrier("b"), "name='a'.*name='b'"),
    "ranks of new_group": (lambda _: rw.new_group([0]), lambda _: rw.new_group([1]), r"ranks=\[0\].*ranks=\[1\]"),
    "piece of reduce_scatter": (
        lambda comm: rw.reduce_scatter([torch.ones(2)] * comm.size),
        lambda comm: rw.reduce_scatter([torch.ones(2)] * (comm.size - 1) + [torch.ones(3)]),
        r"\[\d\] is .*float32\[2\].*float32\[3\]",
    ),
    "number of parameters": (
        lambda _: rw.sync_grads(parameters((2,), (3,))),
        lambda _: rw.sync_grads(parameters((2,))),
        "parameter 1 is .*nothing on",
    ),
    "shape of a parameter": (
        lambda _: rw.sync_grads(parameters((2,))),
        lambda _: rw.sync_grads(parameters((3,))),
        r"float32\[2\].*float32\[3\]",
    ),
    "module": (
        lambda _: rw.sync_params(torch.nn.BatchNorm1d(2)),
        lambda _: rw.sync_params(torch.nn.BatchNorm1d(3)),
        r"weight is .*float32\[2\].*float32\[3\]",
    ),
    "rank of one_rank_only": (on_rank(0), on_rank(1), "rank=0.*rank=1"),
}

# The valid call of most ranks, the invalid one of one rank, and its error.
FAILURES: dict[str, tuple[Talk, Talk, type[Exception], str]] = {
    "op that there is not": (reduce(1), reduce(1, "avg"), rw.InvalidArgumentError, "op='avg'"),
    "op for bools": (reduce(True, "or"), reduce(1, "or"), rw.PayloadTypeError, "for bools"),
    "value that is no number": (reduce([1]), reduce(["text"]), rw.PayloadTypeError, "got a str"),
    "key that has no order": (reduce({"a": 1}), reduce({1.5: 1}), rw.PayloadTypeError, "has the key 1.5"),
    "sparse tensor": (reduce(torch.ones(2)), reduce(torch.ones(2).to_sparse()), rw.PayloadTypeError, "dense"),
    "what cannot be pickled": (
        lambda _: rw.all_gather(1),
        lambda _: rw.all_gather(threading.Lock()),
        rw.PayloadTypeError,
        "cannot be pickled",
    ),
    "src that there is not": (
        lambda _: rw.broadcast(1),
        lambda _: rw.broadcast(1, src=9),
        rw.InvalidArgumentError,
        "src=9 is not a member",
    ),
    "dst that there is not": (
        lambda _: rw.gather(1),
        lambda _: rw.gather(1, dst=9),
        rw.InvalidArgumentError,
        "dst=9 is not a member",
    ),
    "dst of reduce that there is not": (
        lambda _: rw.reduce(1),
        lambda _: rw.reduce(1, dst=9),
        rw.InvalidArgumentError,
        "dst=9 is not a member",
    ),
    "reduce of a text": (lambda _: rw.reduce([1]), lambda _: rw.reduce(["text"]), rw.PayloadTypeError, "got a str"),
    "number of values of all_to_all": (
        lambda comm: rw.all_to_all([torch.ones(LARGE)] * comm.size),
        lambda comm: rw.all_to_all([torch.ones(LARGE)] * (comm.size + 1)),
        rw.InvalidArgumentError,
        r"all_to_all takes one value for each of \d ranks, got a list of \d",
    ),
    "values of all_to_all that are none": (
        lambda comm: rw.all_to_all([1] * comm.size),
        lambda _: rw.all_to_all("text"),
        rw.InvalidArgumentError,
        "got a str",
    ),
    "value of all_to_all that cannot be pickled": (
        lambda comm: rw.all_to_all([1] * comm.size),
        lambda comm: rw.all_to_all([1] * (comm.size - 1) + [threading.Lock()]),
        rw.PayloadTypeError,
        "cannot be pickled",
    ),
    "dim that there is not": (cat(2), cat(2, dim=1), rw.InvalidArgumentError, "dim=1"),
    "gradient of integers": (
        reduce(torch.ones(1), differentiable=True),
        reduce(torch.ones(1).int(), differentiable=True),
        rw.PayloadTypeError,
        "tensors of floats",
    ),
    "pieces": (
        lambda comm: rw.reduce_scatter([torch.ones(2)] * comm.size),
        lambda _: rw.reduce_scatter([torch.ones(2)]),
        rw.InvalidArgumentError,
        "one tensor for each",
    ),
    "no parameters": (
        lambda _: rw.sync_grads(parameters((2,))),
        lambda _: rw.sync_grads(torch.ones(2)),
        rw.InvalidArgumentError,
        "list of parameters",
    ),
    "group of nobody": (
        lambda _: rw.new_group([0]),
        lambda _: rw.new_group([]),
        rw.InvalidArgumentError,
        "one rank or more",
    ),
    "timeout of a barrier": (
        lambda _: rw.barrier(),
        lambda _: rw.barrier(timeout=-1),
        rw.InvalidArgumentError,
        "timeout=-1",
    ),
}


def works(comm: Group) -> None:
    assert rw.all_gather(rw.get_rank()) == list(range(comm.size))
    assert rw.all_reduce(torch.ones(LARGE)).sum().item() == LARGE * comm.size


@pytest.mark.parametrize("odd", [0, -1], ids=["first", "last"])
def test_each_operation_against_each_other(comm: Group, odd: int) -> None:
    odd %= comm.size
    for usual, other in itertools.permutations(OPERATIONS, 2):
        if usual.split()[0] == other.split()[0]:
            continue
        mine = other if rw.get_rank() == odd else usual
        with pytest.raises(rw.MismatchError) as raised:
            OPERATIONS[mine](comm)
        message = str(raised.value)
        for name, ranks in ((other, [odd]), (usual, [rank for rank in range(comm.size) if rank != odd])):
            line = next(line for line in message.splitlines()[1:] if f" {name.split()[0]}(" in line)
            assert all(str(rank) in line or "-" in line for rank in ranks), message
            assert " at test_divergences.py:" in line, message
    works(comm)


def shuffled(cases: dict[str, T], seed: int) -> list[tuple[str, T]]:
    """Return cases in an order that is the same on all ranks, twice: what one leaves behind may disturb another."""
    listed = [*cases.items()] * 2
    random.Random(seed).shuffle(listed)  # noqa: S311 - an order
    return listed


@pytest.mark.soak(50)
@pytest.mark.parametrize("odd", [0, -1], ids=["first", "last"])
def test_each_kind_of_mismatch(comm: Group, odd: int, seed: int) -> None:
    odd %= comm.size
    for name, (usual, other, wanted) in shuffled(MISMATCHES, seed):
        with pytest.raises(rw.MismatchError) as raised:
            (other if rw.get_rank() == odd else usual)(comm)
        message = str(raised.value)
        for side in wanted.split(".*"):
            assert re.search(side, message), (name, message)
    works(comm)


@pytest.mark.soak(50)
@pytest.mark.parametrize("odd", [0, -1], ids=["first", "last"])
def test_an_error_of_one_rank_is_raised_on_all(comm: Group, odd: int, seed: int) -> None:
    odd %= comm.size
    for _, (usual, other, wanted, message) in shuffled(FAILURES, seed):
        if rw.get_rank() == odd:
            with pytest.raises(wanted, match=message):
                other(comm)
        else:
            with pytest.raises(rw.RemoteRankError, match=message) as raised:
                usual(comm)
            assert raised.value.rank == odd
            assert "test_divergences.py:" in raised.value.traceback
    works(comm)


@pytest.mark.parametrize("odd", [0, -1], ids=["first", "last"])
def test_a_rank_that_skips_a_collective_and_one_that_calls_it_twice(comm: Group, odd: int) -> None:
    odd %= comm.size
    for _ in range(20):
        with pytest.raises(rw.MismatchError, match=r"barrier\(\) on .*all_reduce|all_reduce.*barrier\(\) on"):
            if rw.get_rank() != odd:
                rw.all_reduce(1)
            rw.barrier()
        if rw.get_rank() != odd:
            with pytest.raises(rw.MismatchError, match=r"broadcast\("):
                rw.broadcast(1)  # the odd one is past it: it met the others' all_reduce at its barrier
        else:
            with pytest.raises(rw.MismatchError, match=r"broadcast\("):
                rw.all_reduce(1)
        with pytest.raises(rw.MismatchError, match=r"all_reduce.*gather|gather.*all_reduce"):
            rw.all_reduce(1)
            if rw.get_rank() == odd:
                rw.all_reduce(1)
            rw.all_gather(1)
        works(comm)


def test_ranks_that_wait_in_different_groups(comm: Group) -> None:
    """A deadlock: the first two ranks wait for each other in different groups, the other ranks wait for them."""
    rank = rw.get_rank()
    pair, twin = rw.new_group([0, 1]), rw.new_group([0, 1])
    for repetition in range(5):
        for elsewhere, here in ((pair, None), (pair, twin)):
            if rank > 1 and here is twin:
                continue
            with pytest.raises(rw.MismatchError, match="wait for each other in different groups") as raised:
                if rank == repetition % 2:
                    rw.all_reduce(1, group=elsewhere)
                else:
                    rw.barrier(group=here)
            message = str(raised.value)
            assert "all_reduce at test_divergences.py:" in message
            assert "barrier at test_divergences.py:" in message
        works(comm)
        if rank < 2:
            assert rw.all_gather(rank, group=pair) == rw.all_gather(rank, group=twin) == [0, 1]


def test_a_late_rank_is_not_mistaken_for_one_in_another_group(comm: Group) -> None:
    """It calls the collectives of both groups in the same order as the others, only later."""
    rank = rw.get_rank()
    pair = rw.new_group([0, 1])
    if rank == 1:
        time.sleep(1.0)
    if rank < 2:
        assert rw.all_gather(rank, group=pair) == [0, 1]
    works(comm)


def test_a_barrier_that_times_out_names_the_missing_ranks(comm: Group, tmp_path: Path) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    for repetition in range(2):
        rw.all_reduce(1)
        while rank == last and len(list(tmp_path.iterdir())) < last * (1 + repetition):
            time.sleep(0.01)
        with pytest.raises(
            rw.CollectiveTimeoutError, match=rf"Missing: rank {last}, last seen in all_reduce at"
        ) as raised:
            rw.barrier("epoch", timeout=1.0)
        assert isinstance(raised.value, TimeoutError)
        if rank != last:
            (tmp_path / f"{rank} {repetition}").touch()
        works(comm)


def test_a_thread_may_use_a_group_of_its_own(comm: Group) -> None:
    """A second thread of a rank may wait in another group."""
    rank, group = rw.get_rank(), rw.new_group(range(comm.size))
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(rw.all_gather(rank, group=group)))
    if rank == 0:
        thread.start()
        time.sleep(0.3)
        works(comm)
    else:
        works(comm)
        time.sleep(0.3)
        thread.start()
    thread.join()
    assert found == [list(range(comm.size))]
