"""One body for every world: collectives of any values. Expectations are computed from the size of the world."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group

pytestmark = pytest.mark.ranks("serial", 1, 2, 3, 4)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def values_of(rank: int) -> list[object]:
    return [
        rank,
        2**70 + rank,
        rank / 3,
        rank % 2 == 0,
        None,
        "é日本🎉" * rank,
        {"rank": rank, "nested": [("a", rank)], "none": None},
        OrderedDict(b=1, a=rank),
        b"\0" * rank,
        "x" * (1000 * rank),
    ]


def test_all_gather_of_objects_keeps_the_order_of_ranks(comm: Group) -> None:
    rank = rw.get_rank()
    for place, value in enumerate(values_of(rank)):
        assert rw.all_gather(value) == [values_of(other)[place] for other in range(comm.size)]


def test_all_gather_of_tensors_keeps_type_and_shape(comm: Group) -> None:
    rank = rw.get_rank()
    for dtype in DTYPES:
        own = torch.tensor([[0, 1], [1, rank]]).to(dtype)
        gathered = rw.all_gather(own)
        assert len(gathered) == comm.size
        for other, tensor in enumerate(gathered):
            assert tensor.dtype == dtype
            wanted = torch.tensor([[0, 1], [1, other]]).to(dtype)
            assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8))
        gathered[rank].zero_()
        before = torch.tensor([[0, 1], [1, rank]]).to(dtype)
        assert torch.equal(own.view(torch.uint8), before.view(torch.uint8)), "the result is new, alone too"


def test_all_gather_of_ragged_tensors(comm: Group) -> None:
    rank = rw.get_rank()
    gathered = rw.all_gather(torch.full((rank, 3), rank))
    assert [tuple(tensor.shape) for tensor in gathered] == [(other, 3) for other in range(comm.size)]
    assert all((tensor == other).all() for other, tensor in enumerate(gathered))


def test_all_gather_of_scalars_and_empty_tensors(comm: Group) -> None:
    rank = rw.get_rank()
    assert [tensor.shape for tensor in rw.all_gather(torch.tensor(rank))] == [torch.Size([])] * comm.size
    assert [tensor.shape for tensor in rw.all_gather(torch.empty(0, 2))] == [torch.Size([0, 2])] * comm.size
    mixed = rw.all_gather(torch.tensor(7.0) if rank == 0 else torch.empty(0))
    assert [tensor.numel() for tensor in mixed] == [1] + [0] * (comm.size - 1)


def test_all_gather_of_values_of_different_types(comm: Group) -> None:
    rank = rw.get_rank()
    gathered = rw.all_gather(torch.ones(2, dtype=torch.float64) if rank % 2 else "even")
    for other, value in enumerate(gathered):
        if other % 2:
            assert isinstance(value, torch.Tensor)
            assert torch.equal(value, torch.ones(2, dtype=torch.float64))
        else:
            assert value == "even"


class Marked(torch.Tensor):
    """A subclass defined by a user."""


def tensors() -> list[torch.Tensor]:
    grid = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    named = torch.ones(2)
    named.label = "a user's attribute"  # type: ignore[attr-defined]
    image = torch.arange(3000.0).reshape(1, 3, 10, 100)
    return [
        grid,
        grid.t(),
        grid.detach()[:, ::2],
        torch.ones(1).expand(3),
        (grid * 1j).conj(),
        image.to(memory_format=torch.channels_last),
        image.permute(3, 1, 0, 2),
        torch.nn.Parameter(grid.detach()),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.ones(3).as_subclass(Marked),
        torch.ones(5000).as_subclass(Marked),
        named,
    ]


def test_tensors_come_back_as_from_torch_load(comm: Group) -> None:
    """Alone and inside of other values; a view has the strides of its clone."""
    for value in tensors():
        for tensor in (
            *rw.all_gather(value),
            *[inside["x"] for inside in rw.all_gather({"x": value})],
            rw.broadcast((value, value))[1],
            rw.scatter([value] * comm.size),
            *rw.all_to_all([value] * comm.size),
        ):
            assert type(tensor) is type(value)
            assert torch.equal(tensor, value)
            assert (tensor.requires_grad, tensor.is_leaf) == (value.requires_grad, True)
            assert tensor.stride() == value.detach().clone().stride()
            assert vars(tensor) == vars(value)


def test_a_model_and_an_ordered_dict_are_gathered_unchanged(comm: Group) -> None:
    # No parameter is drawn: ranks may be threads, and share the generator.
    model = torch.nn.Sequential(torch.nn.LayerNorm(2), torch.nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    for theirs in rw.all_gather(model):
        assert [
            (name, type(part), part.requires_grad) for name, part in theirs.named_parameters()
        ] == [(name, type(part), part.requires_grad) for name, part in model.named_parameters()]  # fmt: skip
    assert list(rw.broadcast({"b": 1, "a": 2})) == ["b", "a"]


def test_all_gather_cat_is_detached(comm: Group) -> None:
    assert not rw.all_gather_cat(torch.ones(2, requires_grad=True)).requires_grad
    assert type(rw.all_gather_cat(torch.nn.Parameter(torch.ones(2)))) is torch.Tensor


def test_all_gather_of_large_objects(comm: Group) -> None:
    rank = rw.get_rank()
    gathered = rw.all_gather((rank, torch.full((100_000,), float(rank))))
    assert [(other, data.sum().item()) for other, data in gathered] == [
        (other, 100_000.0 * other) for other in range(comm.size)
    ]


def test_gathered_values_are_copies(comm: Group) -> None:
    own = [1, 2]
    gathered = rw.all_gather(own)
    gathered[rw.get_rank()].append(3)
    assert own == [1, 2]


def test_gather_gives_the_list_to_one_rank(comm: Group) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    for dst in {0, last}:
        for place, value in enumerate(values_of(rank)):
            gathered = rw.gather(value, dst=np.int64(dst))  # type: ignore[call-overload]  # an index all the same
            assert gathered == ([values_of(other)[place] for other in range(comm.size)] if rank == dst else None)
        ragged = rw.gather(torch.full((rank,), rank), dst=dst)
        if ragged is not None:
            assert [tensor.tolist() for tensor in ragged] == [[other] * other for other in range(comm.size)]


def test_broadcast_needs_a_value_on_its_source_only(comm: Group) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    for src in {0, last}:
        for place, value in enumerate(values_of(rank)):
            assert rw.broadcast(value if rank == src else None, src=src) == values_of(src)[place]
        tensor = torch.arange(5, dtype=torch.int16) if rank == src else None
        received = rw.broadcast(tensor, src=src)
        assert received is not None
        assert (received.dtype, received.tolist()) == (torch.int16, [0, 1, 2, 3, 4])
        assert received is not tensor


def test_scatter_gives_each_rank_its_own(comm: Group) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    for src in {0, last}:
        mine = rw.scatter([values_of(other) for other in range(comm.size)] if rank == src else None, src=src)
        assert mine == values_of(rank)
        parts = [torch.full((other, 2), other) for other in range(comm.size)] if rank == src else None
        part = rw.scatter(parts, src=src)
        assert (tuple(part.shape), part.sum().item()) == ((rank, 2), 2 * rank * rank)


def sent(src: int, dst: int, place: int) -> Any:
    """Return what one rank sends to another: equal headers, ragged, in trees, in and beyond frames."""
    kinds = (
        torch.full((3,), 10 * src + dst),
        torch.full((5000,), 10 * src + dst),
        torch.full((src * 1000, dst, 2), dst, dtype=torch.int16),
        torch.full((), src + dst / 8, dtype=torch.float64).expand(2 * dst),
        {"from": src, "to": [dst, torch.full((2000 * dst,), src), np.full(3000, src), "é" * 4000 * (src + dst)]},
        torch.ones(7000) * dst if src % 2 else f"{src} to {dst}" if dst % 2 else None,
        [torch.full((3000,), src) for _ in range(300)] if (src, dst) == (0, 1) else torch.full((9,), dst),
        {f"{src} {dst} {index}": torch.ones(100) for index in range(300)},
        b"",
        [torch.full((2000,), src), f"{src} to {dst}" * 500],  # several such pickles are too much for a frame
    )
    return kinds[place]


def is_same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return type(found) is type(wanted) and found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, np.ndarray):
        return type(found) is type(wanted) and found.dtype == wanted.dtype and np.array_equal(found, wanted)
    if isinstance(wanted, dict):
        return wanted.keys() == found.keys() and all(is_same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(wanted) == len(found) and all(map(is_same, found, wanted))
    return bool(type(found) is type(wanted) and found == wanted)


def test_all_to_all_gives_each_rank_the_values_for_it(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    for place in range(10):
        own = [sent(rank, dst, place) for dst in range(size)]
        found = rw.all_to_all(own)
        assert type(found) is list
        assert is_same(found, [sent(src, rank, place) for src in range(size)]), place
        if isinstance(own[rank], torch.Tensor) and own[rank].numel():
            found[rank].zero_()
            assert is_same(own[rank], sent(rank, rank, place)), "the results are copies, alone too"
    assert rw.all_to_all([{"list": [rank]}] * size) == [{"list": [src]} for src in range(size)]


def test_all_to_all_of_rows(comm: Group) -> None:
    """As `scatter` takes them, and everything that `reduce_scatter` takes."""
    rank, size = rw.get_rank(), comm.size
    for columns in (2, 5000):
        rows = torch.arange(size * columns).reshape(size, columns) + 1000 * rank
        wanted = torch.stack([torch.arange(columns) + rank * columns + 1000 * src for src in range(size)])
        arrays: list[Any] = rw.all_to_all(rows.cpu().numpy())  # type: ignore[call-overload]  # arrays have rows
        assert np.array_equal(np.stack(arrays), wanted.cpu().numpy())
        forms: list[Any] = [rows, rows.clone().t().contiguous().t(), rows.chunk(size), tuple(rows), list(rows)]
        for values in forms:
            assert torch.equal(torch.stack([row.reshape(-1) for row in rw.all_to_all(values)]), wanted)
    rows = torch.ones(size, 5000, requires_grad=True)
    for row in rw.all_to_all(rows):
        assert (row.requires_grad, row.is_leaf, row.untyped_storage().nbytes()) == (True, True, 20_000)


def test_all_to_all_of_a_wrong_number_is_refused_on_every_rank(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    wanted = rw.InvalidArgumentError if rank == size - 1 else rw.RemoteRankError
    odd: list[Any] = [[1] * (size + 1), [], "text", b"x", None, 5, iter([1]), {0: 1}, torch.tensor(1), torch.ones(0, 2)]
    for values in odd:
        with pytest.raises(wanted, match=f"all_to_all takes one value for each of {size} ranks, got a"):
            rw.all_to_all(values if rank == size - 1 else [torch.ones(5000)] * size)
    assert rw.all_to_all([rank] * size) == list(range(size)), "and the next collective works"


def test_a_root_that_is_not_a_member_is_refused_in_every_world(comm: Group) -> None:
    for rank in (-1, comm.size, True, 0.0):
        with pytest.raises(rw.InvalidArgumentError, match="src="):
            rw.broadcast(1, src=rank)  # type: ignore[arg-type]  # that is the point
        with pytest.raises(rw.InvalidArgumentError, match="dst="):
            rw.gather(1, dst=rank)  # type: ignore[arg-type]  # that is the point
        with pytest.raises(rw.InvalidArgumentError, match="src="):
            rw.scatter([1] * comm.size, src=rank)  # type: ignore[arg-type]  # that is the point


class Unpicklable:
    def __reduce__(self) -> str:
        raise ValueError("x" * 3_000_000)


def test_a_value_that_cannot_be_pickled_is_refused_on_every_rank(comm: Group) -> None:
    """Rule 11: the rank raises its own error, the others a RemoteRankError with that error."""
    rank, last = rw.get_rank(), comm.size - 1
    value = threading.Lock() if rank == last else "fine"
    wanted = rw.PayloadTypeError if rank == last else rw.RemoteRankError
    with pytest.raises(wanted, match="cannot be pickled"):
        rw.all_gather(value)
    with pytest.raises(wanted, match="cannot be pickled"):
        rw.gather(value)
    with pytest.raises(wanted, match="cannot be pickled"):
        rw.broadcast(value, src=last)
    with pytest.raises(wanted, match="cannot be pickled"):
        rw.scatter([value] * comm.size, src=last)
    with pytest.raises(wanted, match="cannot be pickled"):
        rw.all_to_all([1] * (comm.size - 1) + [value])
    assert rw.all_gather(rank) == list(range(comm.size)), "and the next collective works"


def test_a_scatter_of_the_wrong_length_is_refused_on_every_rank(comm: Group) -> None:
    wanted = rw.InvalidArgumentError if rw.get_rank() == 0 else rw.RemoteRankError
    for values in ([1] * (comm.size + 1), [], "text", None, 5, iter([1] * comm.size)):
        with pytest.raises(wanted, match=f"one value for each of {comm.size} ranks"):
            rw.scatter(values)  # type: ignore[arg-type]  # that is the point
    assert rw.scatter(list(range(comm.size))) == rw.get_rank()


def test_a_long_error_message_is_sent_without_waiting_for_readers(comm: Group) -> None:
    """The part that fits into the connection is sent at once; the rest of three million characters is dropped."""
    rank, last = rw.get_rank(), comm.size - 1
    if rank == last:
        with pytest.raises(rw.PayloadTypeError):
            rw.all_gather(Unpicklable())
        return
    with pytest.raises(rw.RemoteRankError, match="characters left out") as raised:
        rw.all_gather(1)
    assert raised.value.rank == last
    assert len(str(raised.value)) < 100_000


def test_tensors_that_a_receiver_passes_are_those_that_it_gets(comm: Group) -> None:
    """Their number and containers, not their shapes; what has no tensors is ignored. The group stays usable."""
    rank, last = rw.get_rank(), comm.size - 1
    sent: list[Any] = [torch.full((2,), float(last)), {"b": torch.zeros(1)}]
    passed: Any
    for passed in (None, [None, None], "later", (torch.zeros(5), {"a": torch.zeros(3, dtype=torch.int8)})):
        assert rw.broadcast(sent if rank == last else passed, src=last)[0].tolist() == [last, last]
        each = [sent] * comm.size if rank == last else [passed] * comm.size
        assert rw.scatter(each, src=last)[0].tolist() == [last, last]
    for value, passed, text in [
        (b"\x07\x09", [torch.zeros(2), torch.zeros(2)], "2 tensors in lists on this rank, and has received no tensor"),
        (sent, [torch.zeros(2)] * 3, "3 tensors in lists on this rank, and has received 2 tensors in dicts and lists"),
        (sent[:1], sent[0], "a tensor on this rank, and has received 1 tensor in lists"),
        (torch.zeros(1 << 20), [torch.zeros(2)], "1 tensor in lists on this rank, and has received a tensor"),
    ]:
        own: Any = value if rank == last else passed
        for call, given in ((rw.broadcast, own), (rw.scatter, [own] * comm.size)):
            if rank == last:
                call(given, src=last)
                continue
            with pytest.raises(rw.MismatchError) as error:
                call(given, src=last)
            assert text in str(error.value)
    assert rw.all_reduce(1) == comm.size
