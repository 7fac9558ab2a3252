"""The cost of a collective for one rank in groups of all sizes, counted with a transport without other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import pytest
import torch

import rankwise as rw
from rankwise._collectives.all_to_all import _encode
from rankwise._collectives.values_per_rank import serialize_each
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Move
from rankwise._comm.control.protocol import Description
from rankwise._comm.control.verdict import Combine, Verdict
from rankwise._comm.data.planes import Planes
from rankwise._comm.group import Group
from rankwise._comm.reduce_ops import Op
from rankwise.testing.fakes import _FakeControl, _FakePlane

T = TypeVar("T")

SCALARS = {f"metric {index}": index / 7 for index in range(50)}


class CountingControl(_FakeControl):
    """The control plane of a group in which all ranks pass the same values; it counts the frames of this one."""

    def __init__(self, size: int, cost: Counter[str]) -> None:
        super().__init__(0, range(size), [], iter(()))
        self.cost = cost

    def agree(
        self, call: Description, message: bytes, combine: Combine | None, read: Collection[int], timeout: float | None
    ) -> Verdict:
        self.cost["frames"] += 1
        self.cost["bytes in frames"] += len(call.frame(body=message).encode())
        return super().agree(call, message, combine, read, timeout)


class CountingPlane(_FakePlane):
    """Its data plane, which counts the operations, and the bytes that are passed to them."""

    def __init__(self, control: CountingControl) -> None:
        super().__init__(control)
        self.cost = control.cost

    def _counted(self, data: torch.Tensor, operation: Move) -> Move:
        def run() -> None:
            self.cost["operations"] += 1
            self.cost["bytes in operations"] += data.nbytes
            operation()

        return run

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Move:
        return self._counted(tensor, super()._all_reduce(tensor, op))

    def _all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Move:
        return self._counted(data, super()._all_gather(data, gathered))

    def _broadcast(self, data: torch.Tensor, src: int) -> Move:
        return self._counted(data, super()._broadcast(data, src))


def counting_group(size: int) -> tuple[Group, Counter[str]]:
    """Return rank zero's group, and its cost."""
    control = CountingControl(size, Counter())
    planes = Planes([CountingPlane(control)], size, 0)
    return Group(Comm(control, planes, device=torch.device("cpu"))), control.cost


Collective = Callable[[Group], object]

COLLECTIVES: dict[str, Collective] = {
    "barrier": lambda comm: rw.barrier(group=comm),
    "a tensor": lambda comm: rw.all_reduce(torch.ones(1000), group=comm),
    "a large tensor": lambda comm: rw.all_reduce(torch.ones(1_000_000), group=comm),
    "scalars": lambda comm: rw.all_reduce(SCALARS, group=comm),
    "broadcast": lambda comm: rw.broadcast({"seed": 7}, group=comm),
}


def cost_of(collective: Collective, size: int) -> Counter[str]:
    group, cost = counting_group(size)
    collective(group)
    return cost


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 8, 64, 256])
def test_each_member_sends_one_frame(name: str, size: int) -> None:
    cost = cost_of(COLLECTIVES[name], size)
    assert cost["frames"] == 1
    assert cost["bytes in frames"] < 5000
    assert cost["operations"] == (name == "a large tensor"), "one exchange, and one operation for large data"


@pytest.mark.parametrize("size", [2, 8, 64])
def test_the_message_of_all_to_all_does_not_grow_with_the_number_of_values(size: int) -> None:
    group, cost = counting_group(size)
    assert rw.all_to_all(["text"] * size, group=group) == ["text"] * size
    assert cost["frames"] == 1
    assert cost["bytes in frames"] < 5000
    same, differing = torch.ones(5000), [[torch.ones(5000), f"{index}" * 2000] for index in range(size)]
    headers = _encode(serialize_each([same] * size, size, "", most_inline=0))
    assert len(headers) < 1000, "tensors of one shape have one header"
    short = [value.with_short_header() for value in serialize_each(differing, size, "", most_inline=0)]
    assert len(_encode(short)) < 1000


@pytest.mark.parametrize("size", [2, 64, 4096])
def test_the_counting_group_returns_correct_results(size: int) -> None:
    comm, _ = counting_group(size)
    assert rw.all_reduce({"a": 1, "b": torch.ones(2)}, group=comm)["a"] == size
    assert rw.all_reduce(SCALARS, group=comm)["metric 7"] == pytest.approx(size)
    assert rw.all_reduce(2**62, group=comm) == size * 2**62
    assert len(rw.all_gather("x", group=comm)) == size
