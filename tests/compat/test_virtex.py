"""The names of virtex's module: alone they do not raise and change nothing; in a world they communicate."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group
from rankwise.compat import virtex as dist

mean = pytest.approx


@pytest.mark.ranks("serial", 2, 4)
def test_ranks_know_themselves(comm: Group) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    assert dist.is_master_process() == (comm.rank == 0)
    dist.synchronize()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_are_right_before_they_join(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original returns rank 0 of 1 on every rank then, and so has as many writers of each file as ranks."""
    monkeypatch.setenv("RANK", str(size - 1))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    rw.finalize()
    assert (dist.get_rank(), dist.get_world_size()) == (size - 1, size)
    assert dist.is_master_process() == (size == 1)
    dist.synchronize()
    tensor = torch.ones(2)
    dist.average_across_processes(tensor)
    assert tensor.tolist() == [1.0, 1.0], "nobody has joined"


@pytest.mark.ranks("serial", 2, 4)
def test_a_tensor_becomes_its_mean_in_place(comm: Group) -> None:
    tensor = torch.full((3,), float(dist.get_rank()))
    before = tensor.data_ptr()
    dist.average_across_processes(tensor)
    assert tensor.data_ptr() == before
    assert tensor.tolist() == [(comm.size - 1) / 2] * 3


@pytest.mark.ranks("serial", 2, 4)
def test_a_dict_becomes_its_means_whatever_the_order_of_its_keys(comm: Group) -> None:
    """The original adds up one key of this rank and another one of that."""
    rank = dist.get_rank()
    values = {"a": torch.tensor(float(rank)), "b": torch.full((2, 2), 100.0 + rank)}
    mine = OrderedDict(reversed(values.items())) if rank % 2 else values
    dist.average_across_processes(mine)
    assert values["a"].item() == mean((comm.size - 1) / 2)
    assert values["b"].tolist() == [[100 + (comm.size - 1) / 2] * 2] * 2
    assert list(mine) == (["b", "a"] if rank % 2 else ["a", "b"])


@pytest.mark.ranks(2)
def test_dicts_in_dicts_are_averaged_too(comm: Group) -> None:
    inner = torch.tensor(float(dist.get_rank()))
    dist.average_across_processes({"losses": {"caption": inner}})  # type: ignore[dict-item]  # more than the original takes
    assert inner.item() == 0.5


@pytest.mark.ranks(2, 4)
def test_half_precision_does_not_overflow(comm: Group) -> None:
    """The original sums first: 2 * 40000 is beyond float16."""
    tensor = torch.full((2,), 40000.0, dtype=torch.float16)
    dist.average_across_processes({"big": tensor})
    assert tensor.tolist() == [40000.0, 40000.0]


@pytest.mark.ranks(2, 4)
def test_integers_are_refused_before_anything_is_sent(comm: Group) -> None:
    """The original raises too, when it has put the sum in their place."""
    loss, seen = torch.tensor(float(dist.get_rank())), torch.tensor([3, dist.get_rank()])
    with pytest.raises(rw.PayloadTypeError, match=r"int64 cannot hold a mean; average tensor.float\(\)"):
        dist.average_across_processes({"loss": loss, "seen": seen})
    assert (loss.item(), seen.tolist()) == (dist.get_rank(), [3, dist.get_rank()])
    assert rw.all_reduce(1) == comm.size, "and the ranks go on"


@pytest.mark.ranks("serial", 2, 4)
def test_what_is_neither_a_tensor_nor_a_dict_passes(comm: Group) -> None:
    """As in the original, where a loss that was made a number already, or a list, stays as it is."""
    tensor = torch.tensor(float(dist.get_rank()))
    for value in (0.5, 3, None, "text", [tensor], (tensor,)):
        dist.average_across_processes(value)  # type: ignore[arg-type]  # which is the point
    if dist.get_rank() == 0:
        dist.average_across_processes(0.5)  # type: ignore[arg-type]  # on one rank alone: nothing is sent
    assert tensor.item() == dist.get_rank()
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2, 4)
def test_what_is_no_tensor_in_a_dict_is_refused_on_all_ranks(comm: Group) -> None:
    value = {"loss": 1.0 if dist.get_rank() == 1 else torch.tensor(1.0)}
    error = rw.PayloadTypeError if dist.get_rank() == 1 else rw.RemoteRankError
    with pytest.raises(error, match="in place, got a number"):
        dist.average_across_processes(value)  # type: ignore[arg-type]  # which is the point
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2)
def test_a_slice_becomes_its_mean_and_what_lies_between_stays(comm: Group) -> None:
    """The original reduces as many numbers as the slice has, from where it begins: others' among them."""
    whole = torch.arange(12.0).view(3, 4) * (1 + dist.get_rank())
    between = whole[:, 1::2].clone()
    dist.average_across_processes({0.5: whole[:, ::2]})  # type: ignore[dict-item]  # a key that it takes too
    assert torch.equal(whole[:, ::2], torch.arange(12.0).view(3, 4)[:, ::2] * 1.5)
    assert torch.equal(whole[:, 1::2], between)


@pytest.mark.ranks(2)
def test_the_gradient_of_a_mean_is_that_of_this_ranks_share(comm: Group) -> None:
    """As the original's division in place has it."""
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * (1 + dist.get_rank())).sum()
    dist.average_across_processes(loss)
    assert loss.item() == 3.0
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [(1 + dist.get_rank()) / 2] * 2


@pytest.mark.ranks(2)
def test_ranks_may_differ_in_strides_and_gradients(comm: Group) -> None:
    tensor = torch.ones(2, 4) if comm.rank else (torch.ones(4, 2, requires_grad=True) * 3).t()
    dist.average_across_processes(tensor)
    assert torch.equal(tensor, torch.full((2, 4), 2.0))


@pytest.mark.ranks(2, 4)
def test_ranks_with_other_keys_are_told(comm: Group) -> None:
    key = "other" if dist.get_rank() == 1 else "loss"
    tensor = torch.ones(1)
    with pytest.raises(rw.MismatchError):
        dist.average_across_processes({key: tensor})
    assert tensor.item() == 1.0


@pytest.mark.ranks("serial", 2)
def test_parameters_are_averaged_without_a_gradient(comm: Group) -> None:
    parameter = torch.nn.Parameter(torch.tensor([float(dist.get_rank())]))
    dist.average_across_processes(parameter)
    assert parameter.item() == (comm.size - 1) / 2
    assert parameter.requires_grad
    assert parameter.grad_fn is None


@pytest.mark.ranks("serial", 2, 4)
def test_memory_is_a_number_without_a_gpu_too(comm: Group) -> None:
    usage = dist.gpu_mem_usage()
    assert isinstance(usage, int)
    assert (usage > 0) == (torch.cuda.is_available() and torch.cuda.is_initialized())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_is_what_is_in_use_now() -> None:
    """The original shows the largest use so far."""
    big = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    before = dist.gpu_mem_usage()
    del big
    torch.cuda.empty_cache()
    assert dist.gpu_mem_usage() <= before - 200
