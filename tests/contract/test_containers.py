"""One body for every world: containers as values."""

from __future__ import annotations

import gc
import math
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group

pytestmark = [
    pytest.mark.ranks("serial", 1, 2, 3, 4),
    pytest.mark.usefixtures("torch_random"),
]


class Metric(Enum):
    LOSS = "loss"
    ACCURACY = "accuracy"


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Report:
    loss: Any
    seen: int
    note: None = None
    inner: Any = field(default=None)


def test_dicts_match_in_any_order(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    total = sum(range(size))
    names = ["b", "a", "c"] if rank % 2 else ["c", "a", "b"]
    for kind in (dict, OrderedDict, lambda items: defaultdict(lambda: 0, items)):
        value = kind((name, (rank, torch.tensor([float(rank)]))) for name in names)
        reduced = rw.all_reduce(value)
        assert type(reduced) is type(value)
        assert list(reduced) == names, "the order is the caller's"
        for number, tensor in reduced.values():
            assert (number, tensor.tolist()) == (total, [float(total)])


def test_keys_may_be_enums_and_tuples(comm: Group) -> None:
    keys: list[Any] = [Metric.LOSS, Metric.ACCURACY, ("train", 1), True, 7, "x"]
    ordered = keys if rw.get_rank() % 2 else keys[::-1]
    assert rw.all_reduce({key: keys.index(key) for key in ordered}) == {
        key: comm.size * keys.index(key) for key in keys
    }


def test_containers_of_every_type_are_rebuilt(comm: Group) -> None:
    size = comm.size
    value: dict[str, Any] = {
        "list": [1, [2.5, None]],
        "tuple": (True, ()),
        "pair": Pair(1j, {"deep": torch.ones(2, 2)}),
        "report": Report(loss=0.5, seen=1, inner=[Report(loss=torch.tensor(1), seen=2)]),
        "empty": {},
    }
    reduced = rw.all_reduce(value)
    assert reduced["list"] == [size, [2.5 * size, None]]
    assert reduced["tuple"] == (size, ())
    assert type(reduced["pair"]) is Pair
    assert reduced["pair"].first == 1j * size
    assert reduced["pair"].second["deep"].tolist() == [[size] * 2] * 2
    assert reduced["report"].loss == 0.5 * size
    assert type(reduced["report"].inner[0]) is Report
    assert reduced["report"].inner[0].seen == 2 * size
    assert reduced["report"].inner[0].loss.dtype == torch.int64
    assert value["report"].loss == 0.5, "the input is the caller's"


def test_many_tensors_keep_their_types_and_share_no_memory(comm: Group) -> None:
    size = comm.size
    for length in (3, 5000):
        value = {
            str(dtype): [torch.ones(length, dtype=dtype), torch.ones(2, length, dtype=dtype)]
            for dtype in (torch.float32, torch.float64, torch.int64, torch.int16, torch.bfloat16)
        }
        reduced = rw.all_reduce(value)
        for name, (flat, grid) in reduced.items():
            assert str(flat.dtype) == name
            assert flat.tolist() == [size] * length
            assert grid.shape == (2, length)
            assert flat.untyped_storage().nbytes() == flat.nbytes, "saving it saves nothing else"


def test_numbers_are_exact_and_take_the_widest_type(comm: Group) -> None:
    rank, size, last = rw.get_rank(), comm.size, comm.size - 1
    reduced = rw.all_reduce([2**70, 0.1, True, 1 + 1j, np.float32(0.5), np.int64(3), np.bool_(True)])
    assert reduced == [size * 2**70, sum([0.1] * size), size, size * (1 + 1j), size * 0.5, size * 3, size]
    assert [type(number) for number in reduced] == [int, float, int, complex, float, int, int]
    mixed = rw.all_reduce([1 if rank == last else 0.5, True if rank == last else 2])
    assert mixed == [1 + 0.5 * last, 1 + 2 * last]
    lowest = rw.all_reduce(True if rank == last else 2.5, op="min")
    assert (type(lowest), lowest) == (float if size > 1 else bool, 1.0)
    assert rw.all_reduce([True, rank == 0], op="and") == [True, size == 1]
    means = rw.all_reduce([rank, rank == 0], op="mean")
    assert means == [last / 2, 1 / size]


def test_not_a_number_wins_in_tensors_of_any_size(comm: Group) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for length in (3, 5000):
            value = torch.linspace(-1, 1, length).to(dtype)
            value[0], value[-1] = -math.inf, math.inf
            if rw.get_rank() == comm.size - 1:
                value[1] = math.nan
            for op in ("min", "max"):
                reduced = rw.all_reduce(value, op=op)
                assert reduced.dtype == dtype
                assert reduced.isnan().nonzero().tolist() == [[1]]
                assert torch.equal(reduced[2:], value[2:])
                assert reduced[0] == -math.inf


def test_a_key_of_another_type_is_refused(comm: Group) -> None:
    for key in (1.5, b"x", None, ("a", 1.5), frozenset({1})):
        with pytest.raises(rw.PayloadTypeError, match="has the key"):
            rw.all_reduce({key: 1})


def test_containers_are_gathered_with_their_tensors(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    shared = torch.full((rank, 2), float(rank))

    def value(of: int, tensor: torch.Tensor) -> Any:
        return Report(
            loss=[tensor, tensor],
            seen=of,
            inner=OrderedDict(b=np.full(of * 1000, of), a=torch.arange(of * 1000)[::2], none=None),
        )

    def check(found: Any, of: int) -> None:
        assert found.seen == of
        assert torch.equal(found.loss[0], torch.full((of, 2), float(of)))
        assert found.loss[0] is found.loss[1], "what was one is one"
        assert list(found.inner) == ["b", "a", "none"]
        assert (found.inner["b"] == of).all()
        assert len(found.inner["b"]) == of * 1000
        found.inner["b"] += 1  # it may be written to
        assert torch.equal(found.inner["a"], torch.arange(of * 1000)[::2])

    for other, found in enumerate(rw.all_gather(value(rank, shared))):
        check(found, other)
        if found.inner["a"].numel():
            assert found.inner["a"].untyped_storage().nbytes() == found.inner["a"].nbytes
    for dst in {0, size - 1}:
        gathered = rw.gather(value(rank, shared), dst=dst)
        assert (gathered is None) == (rank != dst)
        for other, found in enumerate(gathered or ()):
            check(found, other)
        check(rw.broadcast(value(rank, shared) if rank == dst else None, src=dst), dst)
        parts = [value(other, torch.full((other, 2), float(other))) for other in range(size)]
        check(rw.scatter(parts if rank == dst else None, src=dst), rank)


def test_parameters_and_modules_are_gathered(comm: Group) -> None:
    def model_of(rank: int) -> torch.nn.Sequential:
        model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.BatchNorm1d(50))
        for place, tensor in enumerate(model.state_dict().values()):
            tensor.fill_(100 * rank + place)
        return model

    for other, found in enumerate(rw.all_gather(model_of(rw.get_rank()))):
        wanted = model_of(other)
        assert isinstance(found[0].weight, torch.nn.Parameter)
        assert found[0].weight.requires_grad
        for name, tensor in wanted.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor)


def test_more_leaves_and_larger_values_than_fit_into_a_frame(comm: Group) -> None:
    size = comm.size
    numbers = {f"key {place}": place for place in range(3000)}
    assert rw.all_reduce(numbers) == {key: size * number for key, number in numbers.items()}
    tensors = [torch.full((10,), float(place)) for place in range(500)]
    assert all((tensor == place * size).all() for place, tensor in enumerate(rw.all_reduce(tensors)))
    text = "x" * (300_000 if rw.get_rank() == 0 else 3)
    assert [len(other) for other in rw.all_gather([text])[0]] == [300_000]
    assert [len(other[0]) for other in rw.all_gather([text])] == [300_000] + [3] * (size - 1)


def test_namedtuples_made_anywhere(comm: Group) -> None:
    Point = namedtuple("Point", "x y")  # noqa: PYI024 - as users write it
    assert rw.all_reduce(Point(1, [2])) == Point(comm.size, [2 * comm.size])


@dataclass
class Late:
    loss: float
    seen: int = field(init=False)


def test_a_torch_size_is_reduced_as_a_tuple(comm: Group) -> None:
    size: Any = torch.Size([2, 3])
    assert rw.all_reduce(size) == (2 * comm.size, 3 * comm.size)
    mean: Any = rw.all_reduce({"shape": size, "none": torch.Size([])}, op="mean")
    assert mean == {"shape": (2.0, 3.0), "none": ()}
    assert type(mean["shape"]) is tuple


def test_numpy_keys_equal_python_keys(comm: Group) -> None:
    plain = [1, 10, 2, "a", ("b", 3)]
    numpys = [np.int64(1), np.int32(10), np.uint8(2), np.str_("a"), (np.str_("b"), np.int8(3))]
    keys: list[Any] = numpys if rw.get_rank() % 2 else plain
    reduced = rw.all_reduce({key: place for place, key in enumerate(keys)})
    assert reduced == {key: comm.size * place for place, key in enumerate(plain)}
    assert [type(key) for key in reduced] == [type(key) for key in keys]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Let Python's collector run before a test, and not in it: at the limit of recursion every finalizer fails."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_cyclic_deep_and_incomplete_values_are_refused(comm: Group) -> None:
    endless: list[Any] = [1]
    endless.append({"itself": endless})
    report = Late(0.5)
    report.seen = endless  # type: ignore[assignment]
    deep: Any = OrderedDict(a=1)
    for _ in range(5000):
        deep = OrderedDict(a=deep)
    for value, message in (
        (endless, "contains itself"),
        (report, "contains itself"),
        (deep, "contains itself, or its containers are nested too deeply"),
        (Late(0.5), "a Late that is reduced has no value in 'seen'"),
        ({"a": [Late(0.5)]}, "no value in 'seen'"),
    ):
        with pytest.raises(rw.PayloadTypeError, match=message):
            rw.all_reduce(value)
        with pytest.raises(rw.PayloadTypeError if rw.get_rank() == 0 else rw.RemoteRankError, match=message):
            rw.all_reduce(value if rw.get_rank() == 0 else 1)
        assert rw.all_reduce(1) == comm.size
