"""One body for every world: gradients, parameters, and which rank does what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise.comm.comm import Comm

pytestmark = [pytest.mark.ranks("serial", 1, 2, 3, 4), pytest.mark.usefixtures("torch_random")]


def test_sync_grads_is_the_gradient_of_the_whole_batch(comm: Comm) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    whole = torch.randn(comm.size * 3, 4)
    model(whole).pow(2).mean().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    model.zero_grad()
    model(whole[rw.get_rank() :: comm.size]).pow(2).mean().backward()
    rw.sync_grads(model)
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_a_gradient_that_only_some_ranks_have_counts_as_zero_elsewhere(comm: Comm) -> None:
    some, none, all_ = (torch.nn.Parameter(torch.zeros(3)) for _ in range(3))
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    all_.grad = torch.full((3,), float(rw.get_rank()))
    if rw.get_rank() == comm.size - 1:
        some.grad = torch.ones(3)
    rw.sync_grads([some, none, all_, frozen])
    torch.testing.assert_close(some.grad, torch.full((3,), 1 / comm.size))
    torch.testing.assert_close(all_.grad, torch.full((3,), (comm.size - 1) / 2))
    assert none.grad is None, "what no rank has, no rank gets"
    assert frozen.grad is None


def test_sync_grads_writes_in_place_and_keeps_types(comm: Comm) -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16, torch.float64)
    ]
    held = []
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 60000.0)
        held.append(parameter.grad)
    rw.sync_grads(parameters)
    for parameter, grad in zip(parameters, held, strict=True):
        assert parameter.grad is grad
        assert (grad == torch.full_like(grad, 60000.0)).all()


def test_sync_grads_makes_sparse_gradients_dense(comm: Comm) -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    if rw.get_rank() == 0:
        embedding(torch.tensor([1])).sum().backward()
    rw.sync_grads(embedding)
    assert embedding.weight.grad is not None
    wanted = torch.zeros(4, 2)
    wanted[1] = 1 / comm.size
    torch.testing.assert_close(embedding.weight.grad, wanted)


def test_sync_grads_refuses_what_are_no_parameters(comm: Comm) -> None:
    with pytest.raises(rw.InvalidArgumentError):
        rw.sync_grads(torch.ones(2))
    with pytest.raises(rw.InvalidArgumentError):
        rw.sync_grads([{"params": []}])  # type: ignore[list-item]  # that is the point


def test_sync_params_gives_all_ranks_those_of_one(comm: Comm) -> None:
    torch.manual_seed(rw.get_rank())
    norm = torch.nn.BatchNorm1d(2)
    counter = norm.num_batches_tracked
    assert counter is not None
    counter += rw.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), norm)
    rw.sync_params(model, src=comm.size - 1)
    for state in rw.all_gather(dict(model.state_dict())):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[name]), name
    assert counter.item() == comm.size - 1


def test_rank_zero_only_runs_on_rank_zero(comm: Comm) -> None:
    @rw.rank_zero_only
    def who(suffix: str) -> str:
        """Say who."""
        return f"{rw.get_rank()}{suffix}"

    assert who("!") == ("0!" if rw.get_rank() == 0 else None)
    assert who.__doc__ == "Say who."


def test_rank_zero_first_runs_the_block_on_rank_zero_before_the_others(comm: Comm, tmp_path: Path) -> None:

    mark = tmp_path / "downloaded"
    with rw.rank_zero_first():
        assert mark.exists() is (rw.get_rank() != 0)
        mark.touch()


def test_what_fails_on_rank_zero_fails_everywhere(comm: Comm) -> None:
    wanted = FileNotFoundError if rw.get_rank() == 0 else rw.RemoteRankError
    entered = False
    with pytest.raises(wanted, match="no such dataset"), rw.rank_zero_first():
        entered = True
        raise FileNotFoundError("no such dataset")
    assert entered is (rw.get_rank() == 0)
    assert rw.all_reduce(1) == comm.size, "and the next collective works"


def test_sync_params_takes_buffers_whose_elements_share_memory(comm: Comm) -> None:
    model = torch.nn.Module()
    model.register_buffer("mask", torch.full((1, 2), float(rw.get_rank())).expand(3, 2))
    rw.sync_params(model, src=comm.size - 1)
    assert torch.equal(model.get_buffer("mask"), torch.full((3, 2), comm.size - 1.0))
