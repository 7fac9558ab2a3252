"""The cost of a collective for one rank in groups of all sizes, counted with a transport without other ranks."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import pytest
import torch

import rankwise as rw
from rankwise._comm.comm import Comm
from rankwise._comm.control.agreement import MAX_MESH_SIZE, Prepared
from rankwise._comm.control.protocol import Call, Frame
from rankwise._comm.control.verdict import Combine, Verdict, combined
from rankwise._comm.group import Group
from rankwise._comm.reduce_ops import Op

SCALARS = {f"metric {index}": index / 7 for index in range(50)}


class CountingComm(Comm):
    """Rank zero of a group in which all ranks pass the same values.

    Attributes:
        cost: Frames and their bytes; operations of the backend and the bytes passed to it.
    """

    def __init__(self, size: int) -> None:
        cpu = torch.device("cpu")
        super().__init__(ranks=range(size), global_rank=0, device=cpu, control_device=cpu)
        self.cost: Counter[str] = Counter()

    def new_group(self, ranks: Sequence[int]) -> Comm:
        return CountingComm(len(ranks))

    def _agree_by_frames(
        self,
        call: Call,
        message: bytes,
        combine: Combine | None,
        read: Collection[int],
        timeout: float | None,  # noqa: ARG002
    ) -> Verdict:
        self.cost["frames"] += 1
        self.cost["bytes in frames"] += len(call.frame(body=message).encode())
        verdict = combined([message] * self.size, combine)
        verdict.bodies = dict.fromkeys(read, message)
        return verdict

    def _post_frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def _count_operation(self, data: torch.Tensor) -> None:
        self.cost["operations"] += 1
        self.cost["bytes in operations"] += data.nbytes

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Prepared[None]:
        def run() -> None:
            self._count_operation(tensor)
            op.reduce_copies(tensor, self.size)

        return run

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> Prepared[torch.Tensor]:
        raise NotImplementedError

    def _all_gather(self, data: torch.Tensor) -> Prepared[list[torch.Tensor]]:
        def run() -> list[torch.Tensor]:
            self._count_operation(data)
            return [data.clone() for _ in self.ranks]

        return run

    def _broadcast(self, data: torch.Tensor, src: int) -> Prepared[None]:  # noqa: ARG002
        return lambda: self._count_operation(data)

    def _transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Prepared[None]:
        raise NotImplementedError


Collective = Callable[[Group], object]

COLLECTIVES: dict[str, Collective] = {
    "barrier": lambda comm: rw.barrier(group=comm),
    "a tensor": lambda comm: rw.all_reduce(torch.ones(1000), group=comm),
    "a large tensor": lambda comm: rw.all_reduce(torch.ones(1_000_000), group=comm),
    "scalars": lambda comm: rw.all_reduce(SCALARS, group=comm),
    "broadcast": lambda comm: rw.broadcast({"seed": 7}, group=comm),
}


def cost_of(collective: Collective, size: int) -> Counter[str]:
    comm = CountingComm(size)
    collective(Group(comm))
    return comm.cost


def python_calls(collective: Collective, size: int) -> int:
    comm = Group(CountingComm(size))
    collective(comm)
    profile = cProfile.Profile()
    profile.runcall(collective, comm)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]  # missing in typeshed


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 8, MAX_MESH_SIZE])
def test_each_member_of_a_small_group_sends_one_frame(name: str, size: int) -> None:
    cost = cost_of(COLLECTIVES[name], size)
    assert cost["frames"] == 1
    assert cost["bytes in frames"] < 5000
    assert cost["operations"] == (name == "a large tensor"), "one exchange, and one operation for large data"


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_cost_of_a_large_group_does_not_grow_with_it(name: str) -> None:
    costs = [cost_of(COLLECTIVES[name], size) for size in (MAX_MESH_SIZE + 1, 1024, 4096)]
    assert costs[0] == costs[1] == costs[2]
    assert costs[0]["frames"] == 0
    operations = {"barrier": 1, "a tensor": 2, "a large tensor": 2, "scalars": 3, "broadcast": 3}
    assert costs[0]["operations"] == operations[name]
    calls = [python_calls(COLLECTIVES[name], size) for size in (MAX_MESH_SIZE + 1, 4096)]
    assert calls[0] == calls[1]


@pytest.mark.parametrize("size", [2, MAX_MESH_SIZE, MAX_MESH_SIZE + 1, 4096])
def test_the_counting_group_returns_correct_results(size: int) -> None:
    comm = Group(CountingComm(size))
    assert rw.all_reduce({"a": 1, "b": torch.ones(2)}, group=comm)["a"] == size
    assert rw.all_reduce(SCALARS, group=comm)["metric 7"] == pytest.approx(size)
    assert rw.all_reduce(2**62, group=comm) == size * 2**62
    assert len(rw.all_gather("x", group=comm)) == size
