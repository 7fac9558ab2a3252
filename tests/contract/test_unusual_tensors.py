"""One body for every world: unusual tensors. A documented result or a rankwise error, the same in all worlds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor

import rankwise as rw
from rankwise._comm.group import Group
from tests.contract.tensor_kinds import Tagged, Wrapper
from tests.tables import each_row

pytestmark = [pytest.mark.ranks("serial", 1, 2, 3), pytest.mark.usefixtures("torch_random")]

# Small ones travel in frames, large ones do not.
LENGTHS = (3, 5000)


def fake(length: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(length)


def made_in_inference(length: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(length)


def freed(length: int) -> torch.Tensor:
    tensor = torch.ones(length)
    tensor.untyped_storage().resize_(0)
    return tensor


# Refused by all reductions.
REFUSED: dict[str, Callable[[int], torch.Tensor]] = {
    "fake": fake,
    "meta": lambda length: torch.ones(length, device="meta"),
    "sparse": lambda length: torch.ones(length).to_sparse(),
    "wrapper": lambda length: Wrapper(torch.ones(length)),
    "lazy": lambda _: torch.nn.LazyLinear(3).weight,
    "freed": freed,
    "quantized": lambda length: torch.quantize_per_tensor(torch.ones(length), 1.0, 0, torch.qint8),
    "float8": lambda length: torch.ones(length).to(torch.float8_e4m3fn),
    "complex32": lambda length: torch.ones(length, dtype=torch.complex32),
}
# Summed like ones.
TAKEN: dict[str, Callable[[int], torch.Tensor]] = {
    "inference": made_in_inference,
    "expanded": lambda length: torch.ones(1).expand(length),
    "leaf": lambda length: torch.ones(length, requires_grad=True),
    "parameter": lambda length: torch.nn.Parameter(torch.ones(length)),
    "result": lambda length: torch.ones(length, requires_grad=True) * 1,
    "tagged": lambda length: torch.ones(length).as_subclass(Tagged),
    "strided": lambda length: torch.ones(2 * length)[::2],
    "flipped": lambda length: torch.ones(length, 2).t()[1],
    "conjugate": lambda length: torch.ones(length, dtype=torch.complex64).conj(),
    "negative": lambda length: torch.full((length,), 1j).conj().imag.neg() * 1.0,
    "negative bit": lambda length: torch.full((length,), 1 - 1j).conj().imag,
    "int8": lambda length: torch.ones(length, dtype=torch.int8),
    "uint16": lambda length: torch.ones(length, dtype=torch.uint16),
    "float16": lambda length: torch.ones(length, dtype=torch.float16),
}


def works(comm: Group) -> None:
    assert rw.all_gather(rw.get_rank()) == list(range(comm.size))
    assert rw.all_reduce(torch.ones(5000)).sum().item() == 5000 * comm.size


def parameter_with(grad: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(grad.shape, dtype=grad.dtype))
    parameter.grad = grad
    return parameter


@pytest.mark.filterwarnings("ignore")  # torch's, of forms that are new or old
@pytest.mark.parametrize("form", REFUSED)
def test_tensors_that_cannot_be_reduced_are_refused_before_anything_is_sent(comm: Group, form: str) -> None:
    for length in LENGTHS:
        tensor = REFUSED[form](length)
        module = torch.nn.Module()
        module.register_buffer("odd", tensor)
        calls: list[Callable[[], object]] = [
            partial(rw.all_reduce, tensor),
            partial(rw.all_reduce, {"a": [tensor]}, op="mean"),
            partial(rw.all_reduce_, tensor),
            partial(rw.reduce, tensor),
            partial(rw.reduce_scatter, [tensor] * comm.size),
        ]
        if form not in {"float8", "complex32"}:  # these have contents, which can travel
            calls += [partial(rw.all_gather_cat, tensor), partial(rw.sync_params, module)]
        if form == "freed":
            calls += [partial(rw.all_gather, {"a": tensor}), partial(rw.gather, tensor)]
            calls += [partial(rw.all_to_all, [tensor] * comm.size)]
        if form == "float8":
            calls.append(partial(rw.sync_grads, [parameter_with(tensor)]))
        for place, call in enumerate(calls):
            with pytest.raises(rw.PayloadTypeError):
                call()
                pytest.fail(f"call {place} of {form}")
        works(comm)


@pytest.mark.filterwarnings("ignore")  # torch's, of forms that are new or old
@each_row("form", TAKEN, collective=True)
def test_tensors_of_unusual_classes_are_reduced(comm: Group, form: str) -> None:
    for length in LENGTHS:
        tensor = TAKEN[form](length)
        before = tensor._version if not tensor.is_inference() else 0
        for result in (rw.all_reduce(tensor), rw.all_reduce([tensor, 1])[0], rw.reduce_scatter([tensor] * comm.size)):
            assert type(result) is torch.Tensor, "whatever the size"
            assert not result.requires_grad
            assert not result.is_inference()
            assert result.to(torch.complex64).sum().item() == length * comm.size
        assert len(rw.all_gather_cat(tensor)) == length * comm.size
        assert tensor.is_inference() or tensor._version == before
        if form == "expanded":
            with pytest.raises(rw.PayloadTypeError, match="is expanded"):
                rw.all_reduce_(tensor)
        elif form != "negative":
            assert rw.all_reduce_(tensor) is tensor
            assert tensor.detach().to(torch.complex64).sum().item() == length * comm.size
            assert tensor.is_inference() or tensor._version > before, "autograd hears of it, in any world"
        works(comm)


def test_modules_and_gradients_of_unusual_types(comm: Group) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    for length in LENGTHS:
        with torch.inference_mode():
            module = torch.nn.BatchNorm1d(length)
        rw.sync_params(module, src=last)

        expanded = torch.nn.Parameter(torch.ones(length))
        (expanded.grad,) = torch.autograd.grad(expanded.sum(), expanded)
        rw.sync_grads([expanded])
        assert expanded.grad is not None
        assert expanded.grad.tolist() == [1.0] * length
        expanded.grad.add_(1)

        half = torch.nn.Parameter(torch.ones(length))
        if hasattr(half, "grad_dtype"):
            half.grad_dtype = torch.float64
            if rank == 0:
                half.grad = torch.ones(length, dtype=torch.float64)
            rw.sync_grads([half])
            assert half.grad is not None
            assert half.grad.dtype == torch.float64
            assert half.grad.sum().item() == pytest.approx(length / comm.size)
        works(comm)
    no_module: Any = [torch.ones(1)]
    for call in (partial(rw.sync_params, no_module[0]), partial(rw.sync_grads, no_module[0])):
        with pytest.raises(rw.InvalidArgumentError, match="takes a module"):
            call()
    works(comm)


@pytest.mark.filterwarnings("ignore")  # torch's, of forms that are new
def test_nested_tensors_are_gathered(comm: Group) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    for length in LENGTHS:
        nested = torch.nested.nested_tensor([torch.full((length,), rank), torch.ones(2 + rank)])
        gathered = rw.all_gather({"n": nested})
        for other, found in enumerate([one["n"] for one in gathered] + [rw.broadcast(nested, src=last)]):
            first, second = found.unbind()
            assert first.tolist() == [min(other, last)] * length
            assert len(second) == 2 + min(other, last)
        works(comm)


def test_under_fake_tensor_mode_every_collective_is_refused(comm: Group) -> None:
    real = torch.ones(3)
    for call in (
        lambda: rw.all_reduce(torch.ones(3)),
        lambda: rw.all_reduce(real),
        lambda: rw.all_gather({"a": "text" * 5000}),
        lambda: rw.broadcast(torch.ones(5000)),
        rw.barrier,
    ):
        with pytest.raises(rw.PayloadTypeError, match="FakeTensorMode"), FakeTensorMode():
            call()
        works(comm)


def test_a_transformed_function_is_refused(comm: Group) -> None:
    for transformed in (torch.func.vmap(rw.all_reduce), torch.func.grad(lambda x: rw.all_reduce(x).sum())):
        with pytest.raises(rw.PayloadTypeError, match=r"torch\.func"):
            transformed(torch.ones(2))
        works(comm)


@each_row("timeout", [10**400, True, 0, -1, float("nan"), "1"], collective=True)
def test_an_invalid_timeout_is_refused_before_anything_is_sent(comm: Group, timeout: Any) -> None:
    with pytest.raises(rw.InvalidArgumentError, match="not a number of seconds above 0"):
        rw.barrier(timeout=timeout)
    rw.barrier(timeout=1e300)
    works(comm)


def test_results_of_functional_collectives_are_waited_for(comm: Group) -> None:
    """As the layers of tensor parallelism return them: their types are `AsyncCollectiveTensor`."""
    if not dist.is_initialized():
        return

    def output() -> Any:
        world: Any = dist.group.WORLD
        found = funcol.all_reduce(torch.ones(3), "sum", world)
        assert type(found).__name__ == "AsyncCollectiveTensor" or comm.size == 1
        return found

    size = comm.size
    assert rw.all_reduce(output()).tolist() == [size * size] * 3
    in_place = output()
    rw.all_reduce_(in_place)
    assert in_place.tolist() == [size * size] * 3
    assert rw.all_gather_cat(output()).tolist() == [size] * 3 * size
    for received in (rw.all_gather({"x": output()})[-1]["x"], rw.broadcast(output())):
        assert type(received) is torch.Tensor
        assert received.tolist() == [size] * 3
    rw.assert_synced(output())
    works(comm)


@pytest.mark.slow
def test_shards_are_refused_in_objects_too(comm: Group) -> None:
    """Another rank would load the shard of the sender as its own."""
    if not dist.is_initialized():
        return
    mesh = dist.init_device_mesh("cpu", (comm.size,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(sharded)
    for value in (sharded, {"a": [sharded]}, module):
        for call in (rw.all_gather, rw.broadcast, rw.gather, lambda value: rw.scatter([value] * comm.size)):
            with pytest.raises((rw.PayloadTypeError, rw.RemoteRankError), match=r"DTensor.*full_tensor\(\)"):
                call(value)
            works(comm)
    assert rw.broadcast({"a": sharded.full_tensor()})["a"].tolist() == [1] * 4
