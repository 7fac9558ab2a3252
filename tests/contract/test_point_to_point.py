"""Send and recv: any value from one rank to another, with the contract of collectives between the two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group
from tests.tables import each_row

pytestmark = pytest.mark.ranks(2, 3)

VALUES: list[Any] = [
    7,
    "text",
    None,
    {"step": 3, "weights": torch.arange(10.0), "list": [1, (2, 3)]},
    torch.arange(300_000).reshape(3, 100, 1000).transpose(0, 2),
    torch.empty(0, 3),
    np.arange(5000.0),
    "x" * 100_000,
]


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return bool(found.shape == wanted.shape and found.dtype == wanted.dtype and torch.equal(found, wanted))
    if isinstance(wanted, np.ndarray):
        return bool((found == wanted).all())
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


@pytest.mark.usefixtures("session")
def test_values_of_any_kind_arrive_in_order() -> None:
    rank = rw.get_rank()
    for value in VALUES:
        if rank == 0:
            rw.send(value, dst=1)
        elif rank == 1:
            assert same(rw.recv(src=0), value)
    if rank == 1:
        rw.send("back", dst=0)
    elif rank == 0:
        assert rw.recv(src=1) == "back"
    assert rw.all_reduce(1) == rw.get_world_size()


def test_in_a_group(comm: Group) -> None:
    """The ranks are global ones, or ranks within the group; the same two ranks can use several groups."""
    last = comm.size - 1
    with rw.new_group([0, last]) as group:
        if group.rank == 0:
            rw.send("a", dst=last, group=group)
            rw.send("b", dst=rw.GroupRank(1), group=group)
            rw.send("c", dst=last)
        elif group.rank == 1:
            assert [rw.recv(src=0, group=group), rw.recv(src=rw.GroupRank(0), group=group)] == ["a", "b"]
            assert rw.recv(src=0) == "c"


@pytest.mark.usefixtures("session")
def test_an_error_of_one_is_raised_on_both() -> None:
    rank = rw.get_rank()
    if rank == 0:
        with pytest.raises(rw.PayloadTypeError, match="generator"):
            rw.send((one for one in [1]), dst=1)
        rw.send("next", dst=1)
    elif rank == 1:
        with pytest.raises(rw.RemoteRankError, match="generator"):
            rw.recv(src=0)
        assert rw.recv(src=0) == "next"
    assert rw.all_reduce(1) == rw.get_world_size()


@pytest.mark.usefixtures("session")
def test_two_ranks_that_both_send_or_both_receive() -> None:
    rank = rw.get_rank()
    for call in (lambda other: rw.send(1, dst=other), lambda other: rw.recv(src=other)):
        if rank < 2:
            with pytest.raises(rw.MismatchError, match=r"deadlock: .*\n.*\n.*") as raised:
                call(1 - rank)
            for src in range(2):
                assert f"send/recv from rank {src} to rank {1 - src} at test_point_to_point.py" in str(raised.value)
    assert rw.all_reduce(1) == rw.get_world_size()


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("sender", [0, 1])
def test_a_rank_that_is_in_another_collective(sender: int) -> None:
    """A deadlock, also in the first call between the two ranks."""
    for _ in range(2):
        with pytest.raises(rw.MismatchError, match=r"deadlock: .*\n.*\n.*") as raised:
            rw.send(1, dst=1 - sender) if rw.get_rank() == sender else rw.barrier()
        call = f"send/recv from rank {sender} to rank {1 - sender} at test_point_to_point.py"
        assert call in str(raised.value)
        assert "barrier at test_point_to_point.py" in str(raised.value)
        assert rw.all_reduce(1) == 2


@pytest.mark.usefixtures("session")
@each_row("other", ["itself", 99, -1, "1", None, 1.5, rw.GroupRank(99)], collective=True)
def test_wrong_ranks(other: Any) -> None:
    """Another rank is not known, so the error is raised here alone."""
    other = rw.get_rank() if other == "itself" else other
    for call in (lambda: rw.send(1, dst=other), lambda: rw.recv(src=other)):
        with pytest.raises(rw.InvalidArgumentError):
            call()
    assert rw.all_reduce(1) == rw.get_world_size()


@pytest.mark.ranks("serial", 1)
@pytest.mark.usefixtures("session")
def test_alone_there_is_nobody_to_send_to() -> None:
    with pytest.raises(rw.InvalidArgumentError, match="itself"):
        rw.send(1, dst=0)
    with pytest.raises(rw.InvalidArgumentError, match="itself"):
        rw.recv(src=0)
