"""The collectives of mmcv's module: parameters and gradients become their means, and ranks that differ raise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise._comm.group import Group
from rankwise.compat import mmcv, vis4d
from tests.tables import each_row


class Hook:
    """Saves on one rank."""

    @mmcv.master_only
    def save(self, path: str, *, epoch: int) -> str:
        return f"{path}/{epoch}"


@pytest.mark.ranks("serial", 2, 4)
def test_ranks_know_themselves(comm: Group) -> None:
    assert mmcv.get_dist_info() == (comm.rank, comm.size)


def test_ranks_are_right_before_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank of the original is rank 0 of 1 then."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    rw.finalize()
    assert mmcv.get_dist_info() == (2, 4)
    assert mmcv.master_only(len)("four") is None
    parameter = torch.ones(1)
    mmcv.allreduce_params([parameter])
    mmcv.allreduce_grads([parameter])
    assert parameter.item() == 1.0, "nobody has joined"


@pytest.mark.ranks("serial", 2, 4)
def test_master_only_runs_on_rank_zero_only(comm: Group) -> None:
    assert Hook().save("work", epoch=3) == ("work/3" if comm.rank == 0 else None)
    assert Hook.save.__name__ == "save"


@pytest.mark.ranks("serial", 2)
@pytest.mark.parametrize("decorator", [mmcv.master_only, vis4d.rank_zero_only])
def test_functions_of_any_kind_are_called_on_rank_zero_only(comm: Group, decorator: Callable[..., Any]) -> None:
    """As by the originals: rankwise's own decorator refuses those whose body does not run when they are called."""

    async def load() -> int:
        return 7

    def batches() -> Iterator[int]:
        yield 7

    loading, batched = decorator(load)(), decorator(batches)()
    if comm.rank == 0:
        assert [asyncio.run(loading), *batched] == [7, 7]
    else:
        assert (loading, batched) == (None, None)


@pytest.mark.ranks("serial", 2, 4)
@each_row(("coalesce", "bucket_size_mb"), [(True, -1), (True, 0), (True, 1), (False, -1)], collective=True)
def test_parameters_become_their_means(comm: Group, coalesce: bool, bucket_size_mb: int) -> None:
    rank, size = mmcv.get_dist_info()
    parameters = [
        nn.Parameter(torch.full((2, 3), float(rank))),
        torch.full((400, 1000), float(rank)),  # larger than a bucket of one
        torch.full((5,), 10.0 + rank, dtype=torch.float64),
        torch.full((3, 2), float(rank)).t(),
    ]
    places = [parameter.data_ptr() for parameter in parameters]
    mmcv.allreduce_params(iter(parameters), coalesce, bucket_size_mb)
    mean = (size - 1) / 2
    for parameter, wanted in zip(parameters, (mean, mean, 10 + mean, mean), strict=True):
        assert parameter.eq(wanted).all(), (parameter, wanted)
    assert [parameter.data_ptr() for parameter in parameters] == places


@pytest.mark.ranks(2)
@pytest.mark.parametrize("coalesce", [False, True])
def test_tensors_of_odd_memory_become_their_means(comm: Group, coalesce: bool) -> None:
    """Without `coalesce` the original reduces the memory between the elements of a slice, and ignores conjugation."""
    rank, _ = mmcv.get_dist_info()
    pairs = torch.tensor([1 + 2j, 3 - 1j]) * (1 + rank)
    whole = torch.arange(8.0).view(2, 4) * (1 + rank)
    with torch.inference_mode():
        frozen = torch.ones(2) * rank
    hidden = torch.ones(3, requires_grad=True) * rank
    squared = hidden.square()
    parameters = [pairs.conj(), whole[:, ::2], frozen, hidden]
    mmcv.allreduce_params(parameters, coalesce)
    assert torch.equal(pairs, torch.tensor([1 + 2j, 3 - 1j]) * 1.5)
    assert torch.equal(whole[:, ::2], torch.arange(8.0).view(2, 4)[:, ::2] * 1.5)
    assert torch.equal(whole[:, 1::2], torch.arange(8.0).view(2, 4)[:, 1::2] * (1 + rank))
    assert frozen.tolist() == [0.5] * 2
    assert hidden.tolist() == [0.5] * 3
    squared.sum().backward()  # autograd does not record the mean, as in the original


@pytest.mark.ranks("serial", 2, 4)
def test_counters_of_batch_norms_are_averaged_too(comm: Group) -> None:
    """Integers make the original raise, and so do bools."""
    norm = nn.BatchNorm1d(3)
    assert norm.num_batches_tracked is not None
    assert norm.running_mean is not None
    norm.num_batches_tracked.fill_(2**40 + 1)
    norm.running_mean.fill_(float(mmcv.get_dist_info()[0]))
    mask = torch.tensor([True, False])
    mmcv.allreduce_params([*norm.buffers(), mask])
    assert norm.num_batches_tracked.item() == 2**40 + 1
    assert norm.running_mean.tolist() == [(comm.size - 1) / 2] * 3
    assert mask.tolist() == [True, False]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("coalesce", [False, True])
def test_half_precision_does_not_overflow(comm: Group, coalesce: bool) -> None:
    """The original sums first if it sends all together, and divides first if not."""
    parameter = torch.full((2,), 40000.0, dtype=torch.float16, requires_grad=True)
    parameter.grad = torch.full((2,), 40000.0, dtype=torch.float16)
    mmcv.allreduce_params([parameter], coalesce)
    mmcv.allreduce_grads([parameter], coalesce)
    assert parameter.tolist() == parameter.grad.tolist() == [40000.0, 40000.0]


@pytest.mark.ranks(2, 4)
def test_ranks_whose_parameters_differ_are_told_and_none_is_changed(comm: Group) -> None:
    rank, size = mmcv.get_dist_info()
    parameters = [torch.full((2,), float(rank)), torch.ones(3 if rank else 4)]
    for coalesce in (False, True):
        with pytest.raises(rw.MismatchError, match="tensor 1"):
            mmcv.allreduce_params(parameters, coalesce)
    with pytest.raises(rw.MismatchError):
        mmcv.allreduce_params(parameters[:1] if rank else parameters)
    with pytest.raises(rw.MismatchError, match="bucket_bytes"):
        mmcv.allreduce_params(parameters[:1], bucket_size_mb=1 + rank)
    assert parameters[0].tolist() == [rank, rank]
    assert rw.all_reduce(1) == size


@pytest.mark.ranks(2)
def test_what_has_no_mean_is_refused_before_anything_is_sent(comm: Group) -> None:
    rank, _ = mmcv.get_dist_info()
    kinds = [torch.eye(2).to_sparse(), torch.ones(2).to(torch.float8_e4m3fn), torch.ones(1).expand(2), 0.5, "weight"]
    for tensor in kinds:
        with pytest.raises(rw.RemoteRankError if rank else rw.PayloadTypeError):
            mmcv.allreduce_params([torch.ones(2) if rank else tensor])  # type: ignore[list-item]  # some are none
    assert rw.all_reduce(1) == 2


@pytest.mark.ranks("serial", 2, 4)
@each_row(("coalesce", "bucket_size_mb"), [(True, -1), (True, 1), (False, -1)], collective=True)
def test_gradients_become_their_means(comm: Group, coalesce: bool, bucket_size_mb: int) -> None:
    """Also where ranks have them for different parameters: the original then mixes one with another, or hangs."""
    rank, size = mmcv.get_dist_info()
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    parameters[2].requires_grad = False
    parameters[0].grad = held = torch.full((3,), float(rank))
    if rank == 0:
        parameters[1].grad = torch.ones(3)
    mmcv.allreduce_grads(iter(parameters), coalesce, bucket_size_mb)
    assert parameters[0].grad is held, "they are written in place, as by the original"
    grads = [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]
    assert grads == [[(size - 1) / 2] * 3, [1 / size] * 3, None, None]
    parameters[0].grad = torch.full((3,), 100.0)
    mmcv.allreduce_grads(iter(parameters), coalesce, bucket_size_mb)
    assert held.tolist() == [(size - 1) / 2] * 3, "that of an earlier step stays"


@pytest.mark.ranks(2, 4)
@pytest.mark.usefixtures("torch_random")
def test_sparse_gradients_are_averaged(comm: Group) -> None:
    rank, size = mmcv.get_dist_info()
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([rank])).sum().backward()
    mmcv.allreduce_grads(embedding.parameters())
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.to_dense().sum(dim=1).tolist() == [2 / size] * size + [0.0] * (4 - size)


@pytest.mark.ranks(2, 4)
def test_ranks_with_other_models_are_told(comm: Group) -> None:
    rank, _ = mmcv.get_dist_info()
    parameter = nn.Parameter(torch.zeros(2 if rank else 3))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(rw.MismatchError):
        mmcv.allreduce_grads([parameter])
    assert parameter.grad.eq(1.0).all()


@pytest.mark.ranks("serial", 2, 4)
def test_coalesced_tensors_are_summed_and_divided_by_what_is_said(comm: Group) -> None:
    rank, size = mmcv.get_dist_info()
    for divisor in (size, 2 * size):
        tensors = [torch.full((2,), float(rank)), torch.full((3,), rank), torch.full((2,), float(rank)).double()]
        mmcv._allreduce_coalesced(tensors, divisor)
        mean = (size - 1) / 2 * size / divisor
        assert [tensor.tolist() for tensor in tensors] == [[mean] * 2, [round(mean)] * 3, [mean] * 2]
