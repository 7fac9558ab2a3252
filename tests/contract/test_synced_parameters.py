"""One body for every world: parameters and buffers that are the same on all ranks, clipping, and DDP."""

from __future__ import annotations

import argparse
import math
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw
from tests.tables import each_row

pytestmark = [
    pytest.mark.ranks("serial", 1, 2, 3),
    pytest.mark.slow_with_ranks(1, 3),
    pytest.mark.usefixtures("torch_random"),
]


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set a variable that parts of torch, which some of its modules import, set otherwise."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def test_means_of_parameters_and_buffers(comm: Any) -> None:
    rank, last = comm.rank, comm.size - 1
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    for parameter in model.parameters():
        parameter.data.fill_(float(rank))
    model.register_buffer("halves", torch.full((2,), 60000.0, dtype=torch.float16))
    model.register_buffer("count", torch.tensor([rank, 3 * rank]))
    model.register_buffer("large", torch.full((2,), torch.iinfo(torch.int64).max))
    model.register_buffer("small", torch.tensor([127, -128], dtype=torch.int8))
    model.register_buffer("mask", torch.tensor(rank == last))
    model.register_buffer("shared", torch.full((1,), float(rank)).expand(3))
    rw.sync_params(model, op="mean", src=last)
    assert all((parameter == last / 2).all() for parameter in model.parameters())
    assert model.get_buffer("halves").tolist() == [60000.0] * 2
    assert model.get_buffer("count").tolist() == [round(last / 2), round(3 * last / 2)]
    assert model.get_buffer("large").tolist() == [torch.iinfo(torch.int64).max] * 2
    assert model.get_buffer("small").tolist() == [127, -128]
    assert model.get_buffer("mask").item(), "bools are those of src"
    assert model.get_buffer("shared").tolist() == [last / 2] * 3
    rw.assert_synced(model)


@each_row("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64], collective=True)
def test_means_leave_equal_values_alone_and_take_lists_of_tensors(comm: Any, dtype: torch.dtype) -> None:
    """Bit by bit, also those whose sum overflows: the sum of three divided by three has other bits."""
    equal = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(50000).to(dtype)
    if not dtype.is_complex:
        equal[:3] = torch.tensor([float("inf"), float("-inf"), torch.finfo(dtype).max])
    tensors = [equal.clone(), torch.full((2, 2), float(comm.rank), dtype=dtype)]
    rw.sync_params(iter(tensors), op="mean", src=comm.size - 1)
    assert torch.equal(tensors[0], equal)
    assert torch.equal(tensors[1], torch.full((2, 2), (comm.size - 1) / 2, dtype=dtype))
    rw.sync_params([tensors[1].fill_(comm.rank)])
    assert tensors[1].tolist() == [[0, 0]] * 2
    with pytest.raises(rw.InvalidArgumentError, match="sync_params takes a module or a list of parameters"):
        rw.sync_params(torch.ones(2))


def test_buffers_of_batch_norms_are_those_of_the_samples_of_all_ranks(comm: Any) -> None:
    samples = torch.randn(comm.size, 64, 3, generator=torch.Generator().manual_seed(0)) * 2 + 5
    samples += torch.arange(comm.size).view(-1, 1, 1) * 3  # the ranks have other data
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3, momentum=None))
    model.register_buffer("offset", torch.full((2,), float(comm.rank)))
    norm: Any = model[1]
    before = [parameter.clone() for parameter in model.parameters()]
    norm(samples[comm.rank])
    variances = torch.stack(rw.all_gather(norm.running_var))  # on XLA devices of the samples, elsewhere unbiased ones
    rw.sync_buffers(model)
    whole = samples.view(-1, 3)
    torch.testing.assert_close(norm.running_mean, whole.mean(0))
    pooled = variances.mean(0) + samples.mean(1).var(0, unbiased=False)
    torch.testing.assert_close(norm.running_var, pooled)
    assert norm.num_batches_tracked == 1
    assert model.get_buffer("offset").tolist() == [(comm.size - 1) / 2] * 2
    assert all(map(torch.equal, before, model.parameters()))
    rw.assert_synced(dict(model.named_buffers()))
    bits = norm.running_var.clone()
    rw.sync_buffers(model)
    assert torch.equal(norm.running_var, bits), "equal statistics stay as they are"
    with pytest.raises(rw.InvalidArgumentError, match="sync_buffers takes a module, got a list"):
        rw.sync_buffers([model])  # type: ignore[arg-type]  # that is the point
    assert rw.all_reduce(1) == comm.size


def test_sync_params_refuses_other_ops(comm: Any) -> None:
    with pytest.raises(rw.InvalidArgumentError, match="op='sum' is neither 'mean' nor None"):
        rw.sync_params(torch.nn.Linear(1, 1), op="sum")
    if comm.size > 1:
        with pytest.raises(rw.MismatchError, match="op='mean'"):
            rw.sync_params(torch.nn.Linear(1, 1), op="mean" if comm.rank else None)
    assert rw.all_reduce(1) == comm.size


def test_values_that_are_the_same(comm: Any) -> None:
    model = torch.nn.BatchNorm1d(3)
    rw.assert_synced(model)
    rw.assert_synced({"step": 3, "text": "a", "none": None, "array": np.ones(2), "nan": [torch.tensor(float("nan"))]})
    rw.assert_synced(torch.ones(2, 3).t())
    rw.assert_synced({})
    rw.assert_synced(np.float32(2))


class Phase(Enum):
    TRAIN = "train"
    TEST = "test"

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        raise TypeError("cannot be pickled")


def test_configurations_are_compared(comm: Any) -> None:
    config = argparse.Namespace(
        lr=np.float32(0.1), layers={"b", "a", ("c", 1)}, steps=range(0, 10, 2), data=Path("x"), phase=Phase.TRAIN,
        inner=argparse.Namespace(dtype=torch.float16, device=torch.device("cpu"), kind=torch.nn.Linear),
    )  # fmt: skip
    rw.assert_synced(config)
    rw.assert_synced([config, {"args": config}])
    if comm.size == 1:
        return
    odd = comm.rank == comm.size - 1
    for owner, name, other, seen in (
        (config, "steps", range(0, 10, 3), r": range\(0, 10, 2\), and range\(0, 10, 3\) on rank"),
        (config, "data", Path("y"), r"PosixPath\('x'\), and PosixPath\('y'\) on rank"),
        (config, "phase", Phase.TEST, "TEST"),
        (config.inner, "dtype", torch.float32, ": torch.float16, and torch.float32 on rank"),
        (config.inner, "kind", torch.nn.Conv2d, "Conv2d"),
    ):
        before = getattr(owner, name)
        setattr(owner, name, other if odd else before)
        with pytest.raises(rw.MismatchError, match=rf"\['{name}'\], .* differs on rank {comm.size - 1} .*{seen}"):
            rw.assert_synced({"config": config})
        setattr(owner, name, before)
    with pytest.raises(rw.MismatchError, match=r"\['layers'\]"):
        rw.assert_synced({"layers": {1, 2, 3} if odd else {1, 2}})


def test_values_that_differ_are_named(comm: Any) -> None:
    if comm.size == 1:
        return
    odd = comm.rank == comm.size - 1
    where = f"differs on rank {comm.size - 1} from rank 0"
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    rw.sync_params(model)
    with torch.no_grad():
        model[0].bias += 0.25 * odd
        model[1].running_mean += float(odd)
    text = rf"0\.bias, float32\[1\] on \w+, {where}, by at most 0\.25; 2 of 7 values differ"
    with pytest.raises(rw.MismatchError, match=text):
        rw.assert_synced(model)
    with pytest.raises(
        rw.MismatchError, match=rf"\['b'\]\[1\], a number, {where}, by at most 2: 1\.0, and 3\.0 on rank \d; 1 of 3"
    ):
        rw.assert_synced({"a": "x", "b": [0.0, 1.0 + 2 * odd]})
    with pytest.raises(
        rw.MismatchError, match=rf"\['a'\], a str, {where}: 'y', and 'x' on rank {comm.size - 1}; 1 of 1"
    ):
        rw.assert_synced({"a": "x" if odd else "y"})
    with pytest.raises(rw.MismatchError, match=r"the value, float32.*, by at most nan"):
        rw.assert_synced(torch.tensor(float("nan") if odd else 1.0))
    with pytest.raises(rw.MismatchError, match=r"\['a'\] is float32\[2\] on \w+ on rank"):
        rw.assert_synced({"a": torch.ones(2 + odd)})
    with pytest.raises(rw.PayloadTypeError if odd else rw.RemoteRankError, match="compares tensors, arrays"):
        rw.assert_synced({"a": object() if odd else 1})
    assert rw.all_reduce(1) == comm.size


@each_row("norm_type", [2.0, 1.0, float("inf")], collective=True)
def test_clipping_of_the_same_gradients_and_of_shards(comm: Any, norm_type: float) -> None:
    whole = [torch.nn.Parameter(torch.zeros(2)) for _ in range(comm.size)]
    for number, parameter in enumerate(whole):
        parameter.grad = torch.full((2,), number - 2.0)
    shard = torch.nn.Parameter(torch.zeros(2))
    shard.grad = torch.full((2,), comm.rank - 2.0)
    unused = torch.nn.Parameter(torch.zeros(2))
    copies = [torch.nn.Parameter(torch.zeros(2)) for _ in whole]
    for copied, parameter in zip(copies, whole, strict=True):
        assert parameter.grad is not None
        copied.grad = parameter.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(whole, 0.5, norm_type)
    torch.testing.assert_close(rw.clip_grad_norm_([shard, unused], 0.5, norm_type, sharded=True), expected)
    torch.testing.assert_close(rw.clip_grad_norm_(copies, 0.5, norm_type), expected)
    torch.testing.assert_close(shard.grad, whole[comm.rank].grad)
    for copied, parameter in zip(copies, whole, strict=True):
        torch.testing.assert_close(copied.grad, parameter.grad)
    assert rw.clip_grad_norm_(torch.nn.Linear(1, 1), 1.0).item() == 0


def test_clipping_of_gradients_that_differ_is_an_error(comm: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), float(comm.rank))
    if comm.size > 1:
        with pytest.raises(rw.MismatchError, match=r"0\.0 on rank 0, 1\.4142.* on rank.*call sync_grads before"):
            rw.clip_grad_norm_([weight], 1.0)
    weight.grad[0] = float("inf") if comm.rank == 0 else 1.0
    with pytest.raises(rw.CollectiveError, match="the norm of the gradients is inf"):
        rw.clip_grad_norm_([weight], 1.0, sharded=True, error_if_nonfinite=True)
    options: list[dict[str, Any]] = [{"max_norm": -1}, {"max_norm": "1"}, {"norm_type": 0}, {"sharded": 1}]
    for wrong in options:
        with pytest.raises(rw.InvalidArgumentError, match=next(iter(wrong))):
            rw.clip_grad_norm_([weight], **{"max_norm": 1.0, **wrong})
    assert rw.all_reduce(1) == comm.size


def test_wrap_ddp(comm: Any) -> None:
    """Alone too: with the same names and methods, as torch's DDP has in a group of one."""
    model = torch.nn.Linear(2, 1)
    with pytest.raises(rw.InvalidArgumentError, match="has no argument 'find_unused'"):
        rw.wrap_ddp(model, find_unused=True)
    if not torch.distributed.is_initialized():
        with pytest.raises(rw.NotJoinedError, match=r"wrap_ddp needs a process group: call rankwise\.init"):
            rw.wrap_ddp(model)
        return
    wrapped: Any = rw.wrap_ddp(model, gradient_as_bucket_view=True)
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.device_ids is None
    assert wrapped.gradient_as_bucket_view
    rw.assert_synced(wrapped.module)
    wrapped(torch.full((2, 2), float(comm.rank))).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[float(comm.size - 1)] * 2]
    with pytest.raises(rw.InvalidArgumentError, match="DistributedDataParallel: it is wrapped already"):
        rw.wrap_ddp(wrapped)
    with pytest.raises(rw.InvalidArgumentError, match="DistributedDataParallel, which averages gradients itself"):
        rw.sync_grads(wrapped)
    rw.sync_params(wrapped, op="mean")
    if comm.size == 1:
        return
    with pytest.raises(rw.MismatchError, match=r"weight is float32\[1, \d\]"):
        rw.wrap_ddp(torch.nn.Linear(1 + comm.rank, 1))
    odd: Any = [1] if comm.rank else torch.nn.Linear(1, 1)
    with pytest.raises(rw.InvalidArgumentError if comm.rank else rw.RemoteRankError, match="takes a module"):
        rw.wrap_ddp(odd)
    assert rw.all_reduce(1) == comm.size


def test_no_sync_accumulates_without_a_reduction(comm: Any) -> None:
    model = torch.nn.Linear(2, 1)
    if not torch.distributed.is_initialized():
        return
    wrapped: Any = rw.wrap_ddp(model)
    x = torch.full((1, 2), comm.rank + 1.0)
    with rw.no_sync(wrapped):
        wrapped(x).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[comm.rank + 1.0] * 2]
    wrapped(x).sum().backward()
    assert model.weight.grad.tolist() == [[comm.size + 1.0] * 2]
    with pytest.raises(rw.InvalidArgumentError, match="no_sync takes a module"), rw.no_sync([model]):  # type: ignore[arg-type]
        pass


@pytest.mark.slow
def test_no_sync_of_fsdp(comm: Any) -> None:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - it takes seconds

    if comm.size == 1:
        return
    mesh = torch.distributed.init_device_mesh("cpu", (comm.size,))
    model: Any = fully_shard(torch.nn.Linear(2, comm.size, bias=False), mesh=mesh)
    x = torch.full((1, 2), comm.rank + 1.0)
    with rw.no_sync(model):
        model(x).sum().backward()
    grad: Any = model.weight.grad
    assert grad is None, "it is kept until it is reduced"
    model(x).sum().backward()
    grad = model.weight.grad
    assert grad.full_tensor().tolist() == [[comm.size + 1.0] * 2] * comm.size


@pytest.mark.slow
def test_modules_of_fsdp_are_refused(comm: Any) -> None:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - it takes seconds

    if comm.size == 1:
        return
    model: Any = fully_shard(
        torch.nn.Linear(2 * comm.size, 1), mesh=torch.distributed.init_device_mesh("cpu", (comm.size,))
    )
    calls: tuple[Any, ...] = (rw.sync_grads, rw.sync_params, rw.assert_synced, rw.wrap_ddp)
    for call, part in [(call, part) for call in calls for part in (model, torch.nn.Sequential(model))]:
        with pytest.raises(rw.InvalidArgumentError, match="FSDPModule"):
            call(part)
    with pytest.raises(rw.PayloadTypeError, match="DTensor"):
        rw.sync_grads(model.parameters())
    assert rw.all_reduce(1) == comm.size


@pytest.mark.slow
@each_row("norm_type", [1.0, 2.0, math.inf], collective=True)
def test_clipping_of_modules_of_fsdp(comm: Any, norm_type: float) -> None:
    """Some of its parameters are DTensors, others are not; rows of the former are not the same on all ranks."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - it takes seconds

    if comm.size == 1:
        return
    whole, model = (
        torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1, bias=False)).requires_grad_() for _ in range(2)
    )
    for one, copy in zip(whole.parameters(), model.parameters(), strict=True):
        with torch.no_grad():
            copy.copy_(one.copy_(torch.arange(1.0, one.numel() + 1).view_as(one)))
    mesh = torch.distributed.init_device_mesh("cpu", (comm.size,))
    fully_shard(model[0], mesh=mesh)
    for module in (whole, model):
        module(torch.ones(4, 3)).sum().backward()
    with pytest.raises(rw.InvalidArgumentError, match="sharded=True, and there are gradients of DeviceMesh"):
        rw.clip_grad_norm_(model, 0.5, norm_type, sharded=True)
    is_first = rw.get_rank() == 0
    with pytest.raises(rw.InvalidArgumentError if is_first else rw.RemoteRankError, match="max_norm='much'"):
        rw.clip_grad_norm_(model, "much" if is_first else 0.5, norm_type)  # type: ignore[arg-type]
    with pytest.raises(rw.MismatchError, match="meshes=1"):
        rw.clip_grad_norm_([] if is_first else model, 0.5, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5, norm_type)
    torch.testing.assert_close(rw.clip_grad_norm_(model, 0.5, norm_type), expected)
    for full, part in zip(whole.parameters(), model.parameters(), strict=True):
        grad: Any = part.grad
        torch.testing.assert_close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, full.grad)
    groups = [rw.new_group([rank]) for rank in range(comm.size)]
    again = rw.clip_grad_norm_(model, 9.0, norm_type, sharded=True, group=groups[comm.rank])
    torch.testing.assert_close(again, torch.tensor(0.5), rtol=1e-4, atol=0.0)


def test_norms_that_are_no_numbers(comm: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), math.nan if comm.rank == comm.size - 1 else 1.0)
    for norm_type in (2.0, math.inf):
        assert rw.clip_grad_norm_([weight], 1.0, norm_type, sharded=True).isnan()


@pytest.mark.slow
def test_compiled_modules(comm: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 300), torch.nn.Tanh(), torch.nn.Linear(300, 200))
    compiled: Any = torch.compile(model, backend="eager")
    rw.sync_params(compiled if comm.rank == 0 else model)
    rw.assert_synced(model if comm.rank == 0 else compiled)
    for step in range(3):
        model.zero_grad()
        compiled(torch.full((3, 2), 1.0 + comm.rank + step)).pow(2).mean().backward()
        rw.sync_grads(compiled if comm.rank == 0 else model)
        rw.assert_synced([parameter.grad for parameter in model.parameters()])
    assert rw.all_reduce(1) == comm.size
