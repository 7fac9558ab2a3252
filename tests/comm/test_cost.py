"""What a collective costs one rank as the world grows, counted on a transport whose other ranks do the same."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

import rankwise as rw
from rankwise._comm.control.agreement import MAX_MESH_SIZE, Prepared
from rankwise._comm.control.protocol import Frame
from rankwise._comm.group import Comm
from rankwise._comm.reduce_ops import Op

SCALARS = {f"metric {place}": place / 7 for place in range(50)}


class CountingComm(Comm):
    """Rank zero of a world in which all ranks do the same.

    Attributes:
        spent: Frames and their bytes sent to other ranks; operations of the backend and the bytes given to it.
    """

    def __init__(self, size: int) -> None:
        cpu = torch.device("cpu")
        super().__init__(ranks=range(size), global_rank=0, device=cpu, control_device=cpu)
        self.spent: Counter[str] = Counter()

    def new_group(self, ranks: Sequence[int]) -> Comm:
        return CountingComm(len(ranks))

    def _exchange_frames(self, frame: Frame, bodies: Sequence[bytes], timeout: float | None) -> Mapping[int, Frame]:  # noqa: ARG002
        self.spent["frames"] += self.size - 1
        self.spent["bytes in frames"] += sum(len(frame.encode(body)) for body in bodies[1:])
        return {place: replace(frame, body=bodies[0]) for place in range(self.size)}

    def _post_frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def _backend(self, data: torch.Tensor) -> None:
        self.spent["operations"] += 1
        self.spent["bytes in operations"] += data.nbytes

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Prepared[None]:
        def run() -> None:
            self._backend(tensor)
            op.reduce_copies(tensor, self.size)

        return run

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> Prepared[torch.Tensor]:
        raise NotImplementedError

    def _all_gather(self, data: torch.Tensor) -> Prepared[list[torch.Tensor]]:
        def run() -> list[torch.Tensor]:
            self._backend(data)
            return [data.clone() for _ in self.ranks]

        return run

    def _broadcast(self, data: torch.Tensor, src: int) -> Prepared[None]:  # noqa: ARG002
        return lambda: self._backend(data)

    def _transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Prepared[None]:
        raise NotImplementedError


Talk = Callable[[Comm], object]

TALKS: dict[str, Talk] = {
    "barrier": lambda comm: rw.barrier(group=comm),
    "a tensor": lambda comm: rw.all_reduce(torch.ones(1000), group=comm),
    "much": lambda comm: rw.all_reduce(torch.ones(1_000_000), group=comm),
    "scalars": lambda comm: rw.all_reduce(SCALARS, group=comm),
    "broadcast": lambda comm: rw.broadcast({"seed": 7}, group=comm),
}


def spent(talk: Talk, size: int) -> Counter[str]:
    comm = CountingComm(size)
    talk(comm)
    return comm.spent


def python_calls(talk: Talk, size: int) -> int:
    comm = CountingComm(size)
    talk(comm)
    profile = cProfile.Profile()
    profile.runcall(talk, comm)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]  # typeshed leaves it out


@pytest.mark.parametrize("what", TALKS)
@pytest.mark.parametrize("size", [2, 8, MAX_MESH_SIZE])
def test_a_small_group_sends_a_frame_to_each_member(what: str, size: int) -> None:
    costs = spent(TALKS[what], size)
    assert costs["frames"] == size - 1
    assert costs["bytes in frames"] < (size - 1) * 5000
    assert costs["operations"] == (what == "much"), "one trip, and one operation for what does not fit into a frame"


@pytest.mark.parametrize("what", TALKS)
def test_what_a_large_group_costs_does_not_grow_with_it(what: str) -> None:
    costs = [spent(TALKS[what], size) for size in (MAX_MESH_SIZE + 1, 1024, 4096)]
    assert costs[0] == costs[1] == costs[2]
    assert costs[0]["frames"] == 0
    operations = {"barrier": 1, "a tensor": 2, "much": 2, "scalars": 3, "broadcast": 3}
    assert costs[0]["operations"] == operations[what]
    calls = [python_calls(TALKS[what], size) for size in (MAX_MESH_SIZE + 1, 4096)]
    assert calls[0] == calls[1]


@pytest.mark.parametrize("size", [2, MAX_MESH_SIZE, MAX_MESH_SIZE + 1, 4096])
def test_the_counting_world_counts_a_real_result(size: int) -> None:
    comm = CountingComm(size)
    assert rw.all_reduce({"a": 1, "b": torch.ones(2)}, group=comm)["a"] == size
    assert rw.all_reduce(SCALARS, group=comm)["metric 7"] == pytest.approx(size)
    assert rw.all_reduce(2**62, group=comm) == size * 2**62
    assert len(rw.all_gather("x", group=comm)) == size
