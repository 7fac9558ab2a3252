"""Worlds in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise.testing.fakes import Recorded, fake_group, recording


def test_calls_are_recorded() -> None:
    with recording(rank=1, world_size=3) as comm:
        assert rw.get_rank() == 1
        assert rw.topology().local_world_size == 3
        assert rw.all_reduce({"loss": 0.5, "seen": torch.ones(2)})["loss"] == 1.5
        assert rw.all_gather("x") == ["x"] * 3
        assert rw.gather(4, dst=1) == [4, 4, 4]
        assert rw.gather(4, dst=0) is None
        assert (rw.reduce(4, dst=1), rw.reduce(4)) == (12, None)
        assert rw.all_to_all(["a", "b", "c"]) == ["b"] * 3
        for large in rw.all_to_all([torch.full((5000 + place,), place) for place in range(3)]):
            assert (len(large), large[0].item()) == (5001, 1)
        group = rw.new_group([0, 1])
        rw.barrier(group=group)
    assert [call.operation for call in comm.calls] == [
        "all_reduce",
        "all_gather",
        "gather",
        "gather",
        "reduce",
        "reduce",
        "all_to_all",
        "all_to_all",
        "new_group",
        "barrier",
    ]
    assert comm.calls[2] == Recorded(operation="gather", settings={"dst": 1}, ranks=(0, 1, 2))
    assert comm.calls[-1].ranks == (0, 1)
    assert rw.get_world_size() == 1


@pytest.mark.parametrize("op", ["sum", "mean", "product", "min", "max"])
def test_results_are_those_of_ranks_that_pass_the_same(op: str) -> None:
    tensor = torch.full((2000,), 2.0)
    with recording(world_size=3):
        reduced = rw.all_reduce(tensor, op=op)
        scattered = rw.reduce_scatter([tensor] * 3, op=op)
        gathered = rw.all_gather(tensor)
    wanted = {"sum": 6.0, "product": 8.0}.get(op, 2.0)
    assert torch.equal(reduced, torch.full((2000,), wanted))
    assert torch.equal(scattered, reduced)
    assert torch.equal(torch.stack(gathered), tensor.expand(3, 2000))


def test_other_ranks_send_the_replies() -> None:
    sent = {"weights": torch.arange(5000)}
    with recording(rank=1, world_size=2, replies=[sent, "a piece"]):
        assert torch.equal(rw.broadcast(None)["weights"], sent["weights"])  # type: ignore[index]  # it is the other's
        assert rw.scatter(None, src=0) == "a piece"
        assert rw.broadcast("mine", src=1) == "mine"
        assert rw.scatter(["no", "yes"], src=1) == "yes"
        with pytest.raises(rw.InvalidArgumentError, match=r"broadcast\(src=0\): another rank sends here"):
            rw.broadcast(None)


def test_a_training_step_runs() -> None:
    with torch.random.fork_rng(), recording(world_size=2) as comm:
        model = torch.nn.Linear(2, 1)
        rw.sync_params(model)
        model(torch.ones(1, 2)).sum().backward()
        rw.sync_grads(model)
    assert torch.equal(model.weight.grad, torch.ones(1, 2))  # type: ignore[arg-type]  # it has one
    assert [call.operation for call in comm.calls] == ["sync_params", "sync_grads"]


def test_large_values_cannot_be_gathered_on_one_rank() -> None:
    with recording(world_size=2), pytest.raises(rw.InvalidArgumentError, match="beyond 4 KiB"):
        rw.gather(torch.ones(5000))


def test_a_rank_is_one_of_the_world() -> None:
    with pytest.raises(rw.InvalidArgumentError, match="rank=2 is not one of world_size=2"), recording(rank=2):
        pass


def test_a_world_of_thousands() -> None:
    with fake_group(rank=7, world_size=10_000) as session:
        assert (session.rank, dist.get_rank(), rw.get_world_size()) == (7, 7, 10_000)
        rw.barrier()
    assert not dist.is_initialized()
    assert rw.get_world_size() == 1
