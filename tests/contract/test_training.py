"""One body for every world: gradients, parameters, and control of ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group

pytestmark = [pytest.mark.ranks("serial", 1, 2, 3, 4), pytest.mark.usefixtures("torch_random")]


def test_sync_grads_is_the_gradient_of_the_whole_batch(comm: Group) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    with torch.no_grad():  # and not at random: ranks that are threads have one generator
        for parameter in model.parameters():
            parameter.copy_(torch.arange(1.0, parameter.numel() + 1).sin().reshape(parameter.shape))
    whole = torch.arange(comm.size * 12.0).cos().reshape(-1, 4)
    model(whole).pow(2).mean().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    model.zero_grad()
    model(whole[rw.get_rank() :: comm.size]).pow(2).mean().backward()
    rw.sync_grads(model)
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_a_gradient_that_only_some_ranks_have_counts_as_zero_elsewhere(comm: Group) -> None:
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


def test_sync_grads_keeps_sparse_gradients_sparse(comm: Group) -> None:
    """With different rows on each rank, none on one rank, beside dense gradients, in every dtype."""
    rank, size = rw.get_rank(), comm.size
    for dtype in (torch.float32, torch.float16, torch.float64):
        embedding = torch.nn.Embedding(size + 2, 2, sparse=True, dtype=dtype)
        linear = torch.nn.Linear(2, 1, dtype=dtype)
        wanted = torch.zeros(size + 2, 2)
        for other in range(size):
            wanted[: other + 1] += 1 / size if other or size == 1 else 0
        if rank or size == 1:
            linear(embedding(torch.arange(rank + 1).repeat(2)) / 2).sum().backward()
            assert embedding.weight.grad is not None
            assert embedding.weight.grad.is_sparse
            embedding.weight.grad = torch.sparse_coo_tensor(
                embedding.weight.grad.coalesce().indices().repeat(1, 2),
                torch.full((2 * rank + 2, 2), 0.5, dtype=dtype),
                (size + 2, 2),
                check_invariants=False,
            )
        rw.sync_grads([*embedding.parameters(), *linear.parameters()])
        grad = embedding.weight.grad
        assert grad is not None
        assert grad.is_sparse
        assert grad.is_coalesced()
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.to_dense(), wanted.to(dtype))
        assert linear.weight.grad is not None


def test_a_gradient_that_is_sparse_on_some_ranks_and_dense_on_others_becomes_dense(comm: Group) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.ones(3, 2)
    if rw.get_rank() == comm.size - 1:
        parameter.grad = torch.ones(3, 2).to_sparse()
    rw.sync_grads([parameter])
    assert parameter.grad.is_sparse is (comm.size == 1)
    torch.testing.assert_close(parameter.grad.to_dense(), torch.ones(3, 2))
    parameter.grad = torch.eye(3, 2).to_sparse(1 if rw.get_rank() == 0 else 2)
    rw.sync_grads([parameter])
    torch.testing.assert_close(parameter.grad.to_dense(), torch.eye(3, 2))


def test_sparse_gradients_are_averaged_with_another_default_device(comm: Group) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.ones(3, 2).to_sparse(1)
    with torch.device("meta"):
        rw.sync_grads([parameter])
    torch.testing.assert_close(parameter.grad.to_dense(), torch.ones(3, 2))


def test_tensors_that_are_results_may_have_gradients(comm: Group) -> None:
    results = [torch.ones(2, requires_grad=True) * 2 for _ in range(2)]
    for result in results:
        result.retain_grad()
    (results[0].sum() * (rw.get_rank() + 1)).backward()
    rw.sync_grads(results)
    assert results[1].grad is None
    torch.testing.assert_close(results[0].grad, torch.full((2,), (comm.size + 1) / 2))


def test_sync_grads_refuses_other_values_than_parameters(comm: Group) -> None:
    with pytest.raises(rw.InvalidArgumentError):
        rw.sync_grads(torch.ones(2))
    with pytest.raises(rw.InvalidArgumentError):
        rw.sync_grads([{"params": []}])  # type: ignore[list-item]  # that is the point


def test_sync_params_copies_the_parameters_of_one_rank(comm: Group) -> None:
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


def test_rank_zero_only_runs_on_rank_zero(comm: Group) -> None:
    @rw.rank_zero_only
    def who(suffix: str) -> str:
        """Say who."""
        return f"{rw.get_rank()}{suffix}"

    assert who("!") == ("0!" if rw.get_rank() == 0 else None)
    assert who.__doc__ == "Say who."


def test_rank_zero_first_runs_the_block_on_rank_zero_before_the_others(comm: Group, tmp_path: Path) -> None:
    mark = tmp_path / "downloaded"
    with rw.rank_zero_first():
        if rw.get_rank() == 0:
            time.sleep(0.2)  # ranks that do not wait come in the meantime
        assert mark.exists() is (rw.get_rank() != 0)
        mark.touch()


def test_an_error_on_rank_zero_is_raised_on_all(comm: Group) -> None:
    wanted = FileNotFoundError if rw.get_rank() == 0 else rw.RemoteRankError
    entered = False
    with pytest.raises(wanted, match="no such dataset"), rw.rank_zero_first():
        entered = True
        raise FileNotFoundError("no such dataset")
    assert entered is (rw.get_rank() == 0)
    assert rw.all_reduce(1) == comm.size, "and the next collective works"


def test_sync_params_takes_buffers_whose_elements_share_memory(comm: Group) -> None:
    model = torch.nn.Module()
    model.register_buffer("mask", torch.full((1, 2), float(rw.get_rank())).expand(3, 2))
    rw.sync_params(model, src=comm.size - 1)
    assert torch.equal(model.get_buffer("mask"), torch.full((3, 2), comm.size - 1.0))
