"""One body for every world: Ignite's collectives, groups and decorators, over rankwise."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
import rankwise.compat.ignite as idist
from rankwise._comm.group import Group
from tests.tables import each_row

pytestmark = pytest.mark.ranks("serial", 2, 4)


class OnlyHereError(Exception):
    """Raised on one rank."""


def test_getters_say_who_this_is(comm: Group) -> None:
    backend, model = {
        None: (None, "serial"),
        "gloo": ("gloo", "native-dist"),
        "xla": ("xla-tpu", "xla-dist"),
    }[rw.backend()]
    assert (idist.get_rank(), idist.get_world_size()) == (rw.get_rank(), comm.size)
    assert (idist.get_local_rank(), idist.get_nproc_per_node()) == (rw.get_rank(), comm.size)
    assert (idist.get_node_rank(), idist.get_nnodes()) == (0, 1)
    assert (idist.backend(), idist.model_name()) == (backend, model)
    assert idist.hostname() == rw.hostname()
    assert idist.device().type in {"cpu", "cuda", "mps", "xla"}
    assert "gloo" in idist.available_backends()
    idist.sync()
    idist.sync(temporary=True)
    assert idist.get_rank() == rw.get_rank()


@each_row("alike", ["numbers", "tensors"], collective=True)
def test_all_reduce(comm: Group, alike: str) -> None:
    rank = rw.get_rank()
    ranks = range(comm.size)
    wanted = {
        "SUM": sum(other + 1 for other in ranks),
        "PRODUCT": torch.tensor([other + 1 for other in ranks]).prod().item(),
        "MIN": 1,
        "MAX": comm.size,
        "AND": 1 if comm.size == 1 else 0,
        "OR": (0, 1, 3, 3, 7)[comm.size],
    }
    for op, value in wanted.items():
        if alike == "numbers":
            assert idist.all_reduce(rank + 1, op) == value
            continue
        tensor = torch.tensor([rank + 1])
        assert idist.all_reduce(tensor, op=op) is tensor, "reduced in place"
        assert tensor.tolist() == [value]


def test_all_reduce_takes_means(comm: Group) -> None:
    rank, mean = rw.get_rank(), (comm.size - 1) / 2
    for op in ("MEAN", "AVG", "AVERAGE"):
        assert idist.all_reduce(float(rank), op) == mean
        tensor = torch.tensor([float(rank)])
        assert idist.all_reduce(tensor, op) is tensor
        assert tensor.tolist() == [mean]
        assert idist.all_reduce(torch.tensor([rank]), op).tolist() == [mean]


def test_all_reduce_of_transposed_tensors_is_in_place(comm: Group) -> None:
    tensor = torch.arange(6).reshape(2, 3).t() + rw.get_rank() * 0
    idist.all_reduce(tensor)
    assert tensor.equal(torch.arange(6).reshape(2, 3).t() * comm.size)


def test_all_gather(comm: Group) -> None:
    rank, alone = rw.get_rank(), rw.backend() is None
    ranks = list(range(comm.size))
    assert idist.all_gather(rank) == ranks
    assert idist.all_gather(rank / 2) == [other / 2 for other in ranks]
    assert idist.all_gather({"rank": rank, "name": "é"}) == [{"rank": other, "name": "é"} for other in ranks]
    assert idist.all_gather(None) == [None] * comm.size
    assert idist.all_gather(torch.full((2, 3), rank)).equal(
        torch.tensor(ranks).repeat_interleave(2)[:, None].expand(-1, 3)
    )
    assert idist.all_gather(torch.tensor(rank)).shape == (() if alone else (comm.size,))
    ragged = idist.all_gather(torch.full((rank + 1,), rank))
    assert ragged.tolist() == [other for other in ranks for _ in range(other + 1)]


def test_all_gather_tensors_with_shapes(comm: Group) -> None:
    rank = rw.get_rank()
    shapes = [[other + 1, 2 * other + 1] for other in range(comm.size)]
    gathered = idist.all_gather_tensors_with_shapes(torch.full(shapes[rank], rank), shapes)
    for other, part in enumerate(gathered):
        assert part.equal(torch.full(shapes[other], other))


def test_broadcast(comm: Group, tmp_path: Path) -> None:
    rank = rw.get_rank()
    for src in range(comm.size):
        mine = rank == src
        pairs: tuple[tuple[Any, Any], ...] = (
            (7, 0),
            (0.1, 0.0),
            (True, False),
            ("日本", ""),
            (tmp_path, Path()),
            (2**70, 1),
            (1, 0.5),
        )
        for value, other in pairs:
            for got in (
                idist.broadcast(value if mine else other, src=src),
                idist.broadcast(value if mine else None, src=src, safe_mode=True),
            ):
                assert (got, type(got)) == (value, type(value))
        tensor = torch.full((2, 2), src if mine else -1)
        assert idist.broadcast(tensor, src) is tensor, "received in place"
        assert tensor.equal(torch.full((2, 2), src))
        kinds: tuple[Any, ...] = (None, "another kind", torch.ones(7), [object()])
        for kind in kinds:
            assert idist.broadcast(torch.ones(3) if mine else kind, src, safe_mode=True).equal(torch.ones(3))


def test_barrier_waits_for_all(comm: Group, tmp_path: Path) -> None:
    mark = tmp_path / str(rw.get_rank())
    mark.touch()
    idist.barrier()
    assert len(list(mark.parent.iterdir())) == comm.size
    idist.barrier()


@pytest.mark.parametrize("with_barrier", [False, True])
def test_one_rank_only(comm: Group, with_barrier: bool) -> None:
    rank, last = rw.get_rank(), comm.size - 1

    @idist.one_rank_only(last, with_barrier=with_barrier)
    def work(factor: int) -> int:
        """Work."""
        return factor * rank

    assert work(3) == (3 * last if rank == last else None)
    assert work.__doc__ == "Work."
    nobody = idist.one_rank_only(rank=9, with_barrier=with_barrier)(lambda: 1)
    assert nobody() is None


@pytest.mark.parametrize("local", [False, True])
def test_one_rank_first(comm: Group, tmp_path: Path, local: bool) -> None:
    last = comm.size - 1
    mark = tmp_path / "cache"
    with idist.one_rank_first(last, local=local):
        found = mark.exists()
        mark.touch()
    assert found is (rw.get_rank() != last)


def test_wrong_arguments_are_refused_on_every_rank(comm: Group) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="Unsupported reduction operation: 'sum' is none of SUM"):
            idist.all_reduce(1, op="sum")
        for value in ("abc", [1], None):
            with pytest.raises(TypeError, match="Unhandled input type"):
                idist.all_reduce(value)
        with pytest.raises(TypeError, match="Unhandled input type"):
            idist.broadcast([1])
        with pytest.raises(ValueError, match="Source data can not be None"):
            idist.broadcast(None, src=rw.get_rank())
        with pytest.raises(ValueError, match="list of int"):
            idist.new_group(["a"])  # type: ignore[list-item]  # that is the point
        for local in (False, True):
            with pytest.raises(ValueError, match="rank should be between 0 and"), idist.one_rank_first(9, local=local):
                pass
        with pytest.raises(ValueError, match=r"shapes has \[9\] for rank"):
            idist.all_gather_tensors_with_shapes(torch.ones(2), [[9]] * comm.size)
        with pytest.raises(ValueError, match="shapes has 5 shapes"):
            idist.all_gather_tensors_with_shapes(torch.ones(2), [[2]] * 5)
        with pytest.raises(TypeError, match="Unhandled input type"):
            idist.all_gather_tensors_with_shapes("abc", [[2]] * comm.size)  # type: ignore[arg-type]
    assert idist.all_reduce(1) == comm.size, "and the next collective works"


def test_wrong_arguments_on_one_rank_are_heard_on_all(comm: Group) -> None:
    """Rule 11."""
    if comm.size == 1:
        return
    mine = rw.get_rank() == comm.size - 1
    calls: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: idist.all_reduce(1, op="SMU" if mine else "SUM"), "SMU"),
        (lambda: idist.all_reduce("abc" if mine else 1), "Unhandled input type"),
        (lambda: idist.all_reduce(0.5 if mine else 1, op="AND"), "compare first"),
        (lambda: idist.all_reduce(1, group="abc" if mine else None), "list of int"),
        (lambda: idist.all_gather(threading.Lock() if mine else 1), "pickled"),
        (lambda: idist.broadcast([] if mine else 1), "Unhandled input type"),
        (lambda: idist.broadcast(None if mine else 1), "safe_mode should be True"),
        (lambda: idist.new_group("ab" if mine else [0]), "list of int"),  # type: ignore[arg-type]
        (lambda: idist.all_gather_tensors_with_shapes(torch.ones(1 + mine), [[1]] * comm.size), "shapes has"),
        (lambda: idist.one_rank_first(9 if mine else 0).__enter__(), "rank should be between 0 and"),
    )
    for call, message in calls:
        with pytest.raises((ValueError, TypeError) if mine else rw.RemoteRankError, match=message):
            call()
    assert idist.all_reduce(1) == comm.size


def test_what_differs_between_ranks_is_named_on_all(comm: Group) -> None:
    if comm.size == 1:
        return
    rank = rw.get_rank()
    last = rank == comm.size - 1
    calls: tuple[Callable[[], object], ...] = (
        lambda: idist.all_reduce(torch.ones(2 + last)),
        lambda: idist.all_reduce(torch.tensor(1) if last else torch.tensor(1.0)),
        lambda: idist.all_reduce(1, op="MAX" if last else "MIN"),
        lambda: idist.all_reduce(torch.ones(2 + last).long(), op="AND"),
        lambda: idist.all_gather(torch.ones(2, 2 + last)),
        lambda: idist.all_gather("abc" if last else torch.ones(1)),
        lambda: idist.broadcast(torch.ones(2 + last)),
        lambda: idist.broadcast("abc" if last else 1),
        lambda: idist.broadcast(1, src=int(last)),
        lambda: idist.new_group([int(last)]),
        lambda: idist.barrier() if last else idist.all_reduce(1),
    )
    for call in calls:
        with pytest.raises(rw.MismatchError, match=f"rank {comm.size - 1}"):
            call()
    assert idist.all_reduce(1) == comm.size


@each_row("how", ["one_rank_only", "one_rank_first", "one_rank_first of the node"], collective=True)
def test_a_failing_block_strands_nobody(comm: Group, how: str) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    wanted = OnlyHereError if rank == last else rw.RemoteRankError

    def fail() -> None:
        raise OnlyHereError("no disk")

    for _ in range(2):
        with pytest.raises(wanted, match="no disk"):
            if how == "one_rank_only":
                idist.one_rank_only(last, with_barrier=True)(fail)()
            else:
                with idist.one_rank_first(last, local="node" in how):
                    fail()
    assert idist.all_reduce(1) == comm.size
