"""sync_grads: training as one process would train on the whole batch, whatever the program does to its gradients."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._comm.buffers import is_expanded
from rankwise._comm.group import Group
from tests.tables import each_row

pytestmark = [
    pytest.mark.ranks("serial", 1, 2, 3),
    pytest.mark.slow_with_ranks(1, 3),
    pytest.mark.usefixtures("torch_random"),
]

BATCH = 12
STEPS = 4
WIDTH = 160


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set a variable that parts of torch, which its optimizers import, set otherwise."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Momentum:
    """An optimizer like those of torch, which import the compiler; it changes gradients in place."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self._moments: dict[torch.Tensor, torch.Tensor] = {}

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                moment = self._moments.setdefault(parameter, torch.zeros_like(parameter)).to(parameter.dtype)
                parameter.grad.add_(moment, alpha=0.5)
                self._moments[parameter] = parameter.grad.clone()
                parameter.sub_(parameter.grad, alpha=0.2)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, WIDTH)
        self.wide = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.last = torch.nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(torch.tanh(self.wide(torch.tanh(self.first(x))))))
        return result


def filled(model: Any) -> Any:
    """Fill a model with the same values on all ranks; not at random, for ranks that are threads have one generator."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(1.0, parameter.numel() + 1).add(number).sin().div(8)
            parameter.copy_(values.reshape(parameter.shape))
    return model


def batches() -> list[torch.Tensor]:
    return [torch.arange(step, step + BATCH * 4.0).cos().reshape(BATCH, 4) for step in range(STEPS)]


def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x.to(next(model.parameters()).dtype)).pow(2).mean()
    return result


Step = Callable[[torch.nn.Module, Any, torch.Tensor, Callable[[], None]], None]


def usual(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
    optimizer.zero_grad()
    loss(model, x).backward()
    sync()
    optimizer.step()


def compare(
    comm: Any,
    step: Step = usual,
    make: Callable[[], torch.nn.Module] = Net,
    optimizer: Callable[[Iterable[torch.Tensor]], Any] = Momentum,
    **options: Any,
) -> Any:
    """Train on parts of each batch, and by one process on all of it; compare, and return the model of this rank."""
    models = [filled(make()) for _ in range(2)]
    for model, is_whole in zip(models, (True, False), strict=True):
        trained = optimizer(model.parameters())
        for x in batches():
            part = x if is_whole else x[comm.rank :: comm.size]
            step(model, trained, part, lambda: None if is_whole else rw.sync_grads(model, **options))  # noqa: B023
    for (name, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
    states = rw.all_gather([parameter.detach() for parameter in models[1].parameters()])
    assert all(torch.equal(own, other) for state in states for own, other in zip(states[0], state, strict=True))
    return models[1]


def test_training_is_that_of_one_process(comm: Any) -> None:
    compare(comm)


def test_sums_of_parts_of_the_loss(comm: Any) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
        optimizer.zero_grad()
        (loss(model, x) / (comm.size if len(x) < BATCH else 1)).backward()
        sync()
        optimizer.step()

    compare(comm, step, op="sum")


@pytest.mark.slow
def test_optimizers(comm: Any) -> None:
    for name in ("SGD", "Adam", "AdamW", "RMSprop"):
        for foreach in (False, True):
            kind = functools.partial(getattr(torch.optim, name), lr=0.01, weight_decay=0.1, foreach=foreach)
            compare(comm, optimizer=kind, make=lambda: Net().double())


def test_zeroed_gradients(comm: Any) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss(model, x).backward()
        sync()
        optimizer.step()

    compare(comm, step)


def test_accumulation(comm: Any) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
        optimizer.zero_grad()
        for part in x.chunk(2):
            (loss(model, part) * len(part) / len(x)).backward()
        sync()
        optimizer.step()

    compare(comm, step)


def test_clipping(comm: Any) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
        optimizer.zero_grad()
        loss(model, x).backward()
        sync()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    compare(comm, step)


def test_a_grad_scaler_skips_the_steps_in_which_a_gradient_overflows_on_any_rank(comm: Any) -> None:
    model = filled(Net())
    optimizer: Any = Momentum(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    scales = []
    for number, x in enumerate(batches()):
        optimizer.zero_grad()
        odd = float("inf") if number == 1 and comm.rank == comm.size - 1 else 1.0
        scaler.scale(loss(model, x[comm.rank :: comm.size]) * odd).backward()
        rw.sync_grads(model)
        before = model.last.bias.clone()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(before, model.last.bias) is (number == 1)
    assert rw.all_gather(scales) == [[4.0, 2.0, 4.0, 8.0]] * comm.size
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@each_row("how", ["grad", "data", "clone", "set_to_other_memory"], collective=True)
def test_replaced_gradients(comm: Any, how: str) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
        optimizer.zero_grad()
        loss(model, x).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            if how == "grad":
                parameter.grad = parameter.grad * 0.5
            elif how == "data":
                parameter.grad.data = parameter.grad.data * 0.5
            elif how == "clone":
                parameter.grad = parameter.grad.clone().mul_(0.5)
            else:
                parameter.grad.set_(parameter.grad * 0.5)
        sync()
        optimizer.step()

    compare(comm, step)


def test_gradients_in_memory_of_the_program_stay_there(comm: Any) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
        flat = model.__dict__.setdefault("flat", torch.zeros(sum(one.numel() for one in model.parameters())))
        views = flat.split([one.numel() for one in model.parameters()])
        for parameter, view in zip(model.parameters(), views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.view_as(parameter)
        flat.zero_()
        loss(model, x).backward()
        sync()
        with torch.no_grad():
            for parameter, view in zip(model.parameters(), views, strict=True):
                parameter.sub_(view.view_as(parameter), alpha=0.5)

    compare(comm, step)


def test_frozen_and_unfrozen_parameters(comm: Any) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
        number = model.__dict__["number"] = model.__dict__.get("number", -1) + 1
        model.wide.requires_grad_(number % 3 == 0)
        usual(model, optimizer, x, sync)

    compare(comm, step)


def test_a_parameter_that_one_rank_alone_has_frozen_is_named(comm: Any) -> None:
    model = filled(Net())
    for x in batches():
        loss(model, x).backward()
        rw.sync_grads(model)
    if comm.size == 1:
        return
    model.norm.requires_grad_(comm.rank == 0)
    with pytest.raises(rw.MismatchError, match=r"norm.weight is float32\[160\] on \w+ on rank 0, nothing on rank"):
        rw.sync_grads(model)
    model.norm.requires_grad_(True)
    rw.sync_grads(model)


def test_shared_parameters(comm: Any) -> None:
    def tied() -> torch.nn.Module:
        model = Net()
        model.norm.weight = model.norm.bias
        return model

    compare(comm, make=tied)
    weight: Any = torch.nn.Parameter(torch.ones(3))
    for _ in range(2):
        (weight * (1.0 + comm.rank)).sum().backward()
        rw.sync_grads([weight, weight])
        torch.testing.assert_close(weight.grad, torch.full((3,), (comm.size + 1) / 2))
        weight.grad = None


def test_a_changed_dtype(comm: Any) -> None:
    for keep in (True, False):

        def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
            usual(model, optimizer, x, sync)
            if not keep:  # noqa: B023
                optimizer.zero_grad()
            number = model.__dict__["number"] = model.__dict__.get("number", -1) + 1
            if number == 1:
                model.float()

        assert next(compare(comm, step, make=lambda: Net().double()).parameters()).dtype is torch.float32


@pytest.mark.parametrize("size", [3, 40_000])
def test_a_changed_shape(comm: Any, size: int) -> None:
    weight: Any = torch.nn.Parameter(torch.ones(size))
    for shape in ((size,), (size,), (2, size), (1,), (2, 1), (1, 2)):
        weight.data = torch.ones(shape)
        weight.grad = None
        if comm.rank == 0 or shape == (2, size):
            (weight * 2).sum().backward()
        rw.sync_grads([weight])
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, torch.full(shape, 2.0 if shape == (2, size) else 2.0 / comm.size))


def test_other_memory_formats(comm: Any) -> None:
    conv: Any = torch.nn.Conv2d(3, 4, 3)
    model = filled(conv.to(memory_format=torch.channels_last))
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 3, 4, 4), 1.0 + comm.rank).to(memory_format=torch.channels_last)).sum().backward()
        rw.sync_grads(model)
        assert model.weight.grad is not None
        assert model.weight.grad.stride() == model.weight.stride()
        torch.testing.assert_close(
            model.weight.grad.contiguous(), torch.full(model.weight.shape, 2.0 * (comm.size + 1))
        )


def test_several_models_and_groups(comm: Any) -> None:
    """A generator and a discriminator; and gradients averaged within groups, and then across."""
    models = [filled(Net()) for _ in range(2)]
    with rw.new_group([0]) as alone:
        for x in batches():
            for model in models:
                model.zero_grad()
                loss(model, x[comm.rank :: comm.size]).backward()
                if comm.rank == 0:
                    rw.sync_grads(model, group=alone)
            for model in models:
                rw.sync_grads(model.last)
                rw.sync_grads([parameter for parameter in model.parameters() if parameter.numel() > 2 * WIDTH])
            grads = rw.all_gather([model.last.bias.grad for model in models])
            assert all(torch.equal(own, other) for state in grads for own, other in zip(grads[0], state, strict=True))


def test_a_copy_on_one_rank(comm: Any) -> None:
    model = filled(Net())
    for x in batches()[:2]:
        used = {0: copy.deepcopy(model), 1: pickle.loads(pickle.dumps(model))}.get(comm.rank, model)
        used.zero_grad()
        loss(used, x[comm.rank :: comm.size]).backward()
        rw.sync_grads(used)
        rw.assert_synced([parameter.grad for parameter in used.parameters()])


@each_row("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], collective=True)
def test_dtypes_without_overflow(comm: Any, dtype: torch.dtype) -> None:
    weights = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (3, 40_000)]
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.full_like(weight, 60000.0)
        rw.sync_grads(weights)
        for weight in weights:
            torch.testing.assert_close(weight.grad, torch.full_like(weight, 60000.0))
            assert weight.grad is not None
            assert weight.grad.dtype is dtype


def test_sums(comm: Any) -> None:
    weights = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    embedding = torch.nn.Parameter(torch.zeros(3))
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.full_like(weight, 1.0 + comm.rank)
        embedding.grad = torch.ones(3).to_sparse()
        rw.sync_grads([*weights, embedding], op="sum")
        total = comm.size * (comm.size + 1) / 2
        assert all(weight.grad.tolist() == [total] * 3 for weight in weights if weight.grad is not None)
        assert embedding.grad.to_dense().tolist() == [float(comm.size)] * 3


def test_gradients_that_come_and_go(comm: Any) -> None:
    sizes = (3, 40_000)
    some, none, all_ = ([torch.nn.Parameter(torch.zeros(size)) for size in sizes] for _ in range(3))
    for number in range(4):
        for parameter in [*some, *none, *all_]:
            parameter.grad = None
        for parameter in all_ + (some if (comm.rank + number) % comm.size == 0 else []):
            (parameter * (1.0 + number)).sum().backward()
        rw.sync_grads([*some, *none, *all_])
        for parameter in some:
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, (1.0 + number) / comm.size))
        assert [parameter.grad for parameter in none] == [None, None]
        for parameter in all_:
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 1.0 + number))


def test_missing_gradients_are_named(comm: Any) -> None:
    model = filled(Net())
    for number in range(2):
        loss(model, batches()[0]).backward()
        model.norm.weight.grad = None
        if comm.rank == comm.size - 1:
            model.last.bias.grad = None
        where = "rank 0" if comm.size == 1 else f"ranks 0-{comm.size - 1}"
        text = f"no gradient of norm.weight on {where}, last.bias on rank {comm.size - 1}:"
        before: list[Any] = [
            None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()
        ]
        with pytest.raises(rw.CollectiveError, match=text):
            rw.sync_grads(model, missing="error")
        for one, parameter in zip(before, model.parameters(), strict=True):
            assert one is parameter.grad or torch.equal(one, parameter.grad)
        if number == 0:
            rw.sync_grads(model)
    model.zero_grad()
    loss(model, batches()[0]).backward()
    rw.sync_grads(model, missing="error")


def test_a_gradient_that_becomes_sparse(comm: Any) -> None:
    """On one rank first, and dense again later."""
    embedding = torch.nn.Parameter(torch.zeros(4, 2))
    other = torch.nn.Parameter(torch.zeros(2))
    for sparse_on in (range(0), range(1), range(comm.size), range(0)):
        embedding.grad = torch.eye(4, 2)
        if comm.rank in sparse_on:
            embedding.grad = torch.eye(4, 2).to_sparse()
        other.grad = torch.full((2,), 1.0 + comm.rank)
        rw.sync_grads([embedding, other])
        assert embedding.grad.is_sparse is (len(sparse_on) == comm.size)
        torch.testing.assert_close(embedding.grad.to_dense(), torch.eye(4, 2))
        torch.testing.assert_close(other.grad, torch.full((2,), (comm.size + 1) / 2))


@pytest.mark.slow
def test_sparse_adam(comm: Any) -> None:
    def embedding() -> torch.nn.Embedding:
        made = torch.nn.Embedding(BATCH, 2, sparse=True)
        filled(made)
        return made

    models = [embedding() for _ in range(2)]
    for model, is_whole in zip(models, (True, False), strict=True):
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            rows = torch.arange(BATCH) if is_whole else torch.arange(BATCH)[comm.rank :: comm.size]
            model(rows).pow(2).mean().backward()
            if not is_whole:
                rw.sync_grads(model)
            assert model.weight.grad is not None
            assert model.weight.grad.is_sparse
            optimizer.step()
    torch.testing.assert_close(models[1].weight, models[0].weight)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_are_part_of_a_graph(comm: Any) -> None:
    weight: Any = torch.nn.Parameter(torch.full((40_000,), 2.0))
    for _ in range(2):
        weight.grad = None
        (weight**3).sum().backward(create_graph=True)
        grad = weight.grad
        assert grad is not None
        rw.sync_grads([weight])
        assert weight.grad is grad, "it stays"
        (second,) = torch.autograd.grad(grad.sum(), weight)
        torch.testing.assert_close(second, torch.full((40_000,), 12.0))
    weight.grad = torch.ones(40_000, requires_grad=True)
    rw.sync_grads([weight])
    assert weight.grad.requires_grad
    weight.grad = None


@each_row("keep", ["the tensors", "detached", "views", "data"], collective=True)
def test_gradients_that_are_kept(comm: Any, keep: str) -> None:
    """As by PCGrad, GradNorm and deferred logging: those of each task, and their mean by reference."""
    kept: list[list[torch.Tensor]] = []
    model = filled(Net())
    means: dict[str, torch.Tensor] = {}
    for task in (1.0, 10.0, 100.0):
        model.zero_grad()
        loss(model, torch.full((comm.size, 4), task)[comm.rank :: comm.size]).mul(task * (comm.rank + 1)).backward()
        own: list[Any] = [parameter.grad for parameter in model.parameters()]
        rw.sync_grads(model)
        form: Callable[[Any], torch.Tensor] = {
            "the tensors": lambda grad: grad,
            "detached": torch.Tensor.detach,
            "views": lambda grad: grad.view(-1)[1:],
            "data": lambda grad: grad.data,
        }[keep]
        kept.append([form(parameter.grad) for parameter in model.parameters()])
        assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), own, strict=True))
        for name, parameter in model.named_parameters():
            means[name] = means[name].lerp(parameter.grad, 0.5) if name in means else parameter.grad
    wanted: dict[str, torch.Tensor] = {}
    for task, grads in zip((1.0, 10.0, 100.0), kept, strict=True):
        expected = filled(Net())
        loss(expected, torch.full((1, 4), task)).mul(task * (comm.size + 1) / 2).backward()
        for grad, (name, parameter) in zip(grads, expected.named_parameters(), strict=True):
            torch.testing.assert_close(grad, form(parameter.grad), rtol=1e-3, atol=1e-4)
            wanted[name] = wanted[name].lerp(parameter.grad, 0.5) if name in wanted else parameter.grad
    for name, mean in means.items():
        torch.testing.assert_close(mean, wanted[name], rtol=1e-3, atol=1e-4)


def test_idioms_of_programs_that_set_gradients_to_zero(comm: Any) -> None:
    """As guided-diffusion and others do; and gradients that replace themselves without their graph."""
    weights: list[Any] = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 40_000)]
    for number in range(4):
        for weight in weights:
            if weight.grad is not None and number % 2:
                weight.grad.detach_()
                weight.grad.zero_()
            elif weight.grad is not None:
                weight.grad = weight.grad.detach()
                weight.grad.zero_()
            (weight * (comm.rank + 1.0)).sum().backward()
        rw.sync_grads(weights)
        for weight in weights:
            torch.testing.assert_close(weight.grad, torch.full_like(weight, (comm.size + 1) / 2).detach())


def test_other_forms_of_gradients_stay_where_they_are(comm: Any) -> None:
    flat = torch.zeros(40, 1000)
    forms: list[tuple[Any, torch.Tensor]] = [
        (torch.zeros(1000, 40), flat.t()),
        (torch.zeros(40, 500), torch.zeros(40, 1000)[:, ::2]),
        (torch.zeros(3), torch.zeros(10)[4:7]),
        (torch.zeros(2, 3, dtype=torch.complex64), torch.zeros(3, 2, dtype=torch.complex64).t().conj()),
        (torch.zeros(()), torch.zeros(())),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
    ]
    weights = [torch.nn.Parameter(values) for values, _ in forms]
    for weight, (_, grad) in zip(weights, forms, strict=True):
        weight.grad = grad.fill_(comm.rank + 1)
    rw.sync_grads(weights)
    for weight, (_, grad) in zip(weights, forms, strict=True):
        assert weight.grad is grad
        assert (grad == (comm.size + 1) / 2).all()
    assert (flat == (comm.size + 1) / 2).all()


def test_gradients_with_memory_in_common(comm: Any) -> None:
    flat = torch.full((10,), comm.rank + 1.0)
    weights = [torch.nn.Parameter(torch.zeros(6)) for _ in range(2)]
    weights[0].grad, weights[1].grad = flat[:6], flat[:6]
    rw.sync_grads(weights)
    assert flat.tolist() == [(comm.size + 1) / 2] * 6 + [comm.rank + 1.0] * 4, "the same memory is reduced once"
    weights[1].grad = flat[4:]
    with pytest.raises(rw.PayloadTypeError, match="parameter 0 and parameter 1 have a part of their memory in common"):
        rw.sync_grads(weights)
    if comm.size > 1:
        weights[1].grad = flat[:6] if comm.rank == 1 else flat[:6].clone()
        with pytest.raises(rw.MismatchError, match=r"parameter 1 is .* in the memory of parameter 0 on rank 1"):
            rw.sync_grads(weights)
    assert flat.tolist() == [(comm.size + 1) / 2] * 6 + [comm.rank + 1.0] * 4


SIZES = (2, 700, 30_000)


@pytest.mark.soak(20)
def test_no_memory_that_was_not_written_gets_into_gradients(comm: Any, seed: int) -> None:
    """With every pattern of gradients that are missing, dense and sparse on the ranks, and new memory full of NaN."""
    draw = random.Random(seed)  # noqa: S311 - the same on all ranks
    patterns = list(itertools.product(("dense", "missing", "sparse"), repeat=comm.size))
    draw.shuffle(patterns)
    with poisoned_memory():
        for first in range(0, len(patterns), 9):
            group = patterns[first : first + 9]
            weights: list[Any] = [torch.nn.Parameter(torch.zeros(draw.choice(SIZES))) for _ in group]
            dtypes = [draw.choice((torch.float32, torch.bfloat16)) for _ in group]
            for index, (weight, pattern) in enumerate(zip(weights, group, strict=True)):
                weight.data = weight.data.to(dtypes[index])
                kind = pattern[comm.rank]
                grad = torch.full_like(weight, comm.rank + 1.0).detach()
                weight.grad = {"dense": grad, "missing": None, "sparse": grad.to_sparse()}[kind]
            rw.sync_grads(weights, op="sum")
            for weight, pattern in zip(weights, group, strict=True):
                total = sum(rank + 1 for rank, kind in enumerate(pattern) if kind != "missing")
                if not total:
                    assert weight.grad is None
                    continue
                assert weight.grad.is_sparse is ("dense" not in pattern)
                assert (weight.grad.to_dense() == total).all(), pattern


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory of torch with NaN in a block."""
    torch.use_deterministic_algorithms(True)  # which fills it, unless told not to
    assert torch.empty(100).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step_that_a_rank_has_left_out_is_an_error(comm: Any) -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    rw.sync_grads([weight], step=0)
    step = 1 + (comm.rank == 0)  # rank 0 has left out step 1: its loss was not a number
    if comm.size == 1:
        return rw.sync_grads([weight], step=step)
    with pytest.raises(rw.MismatchError, match=r"sync_grads\(step=2\) on rank 0, sync_grads\(step=1\) on rank"):
        rw.sync_grads([weight], step=step)
    assert (weight.grad == 1).all()
    return None


def test_results_of_operations_are_refused(comm: Any) -> None:
    weight = torch.ones(2, requires_grad=True)
    kept = weight * 2
    kept.retain_grad()
    kept.sum().backward()
    rw.sync_grads([weight, kept])
    with pytest.raises(rw.InvalidArgumentError, match="result of an operation"):
        rw.sync_grads([weight, weight * 2])


def uneven_parts(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Split a batch into parts of different lengths; the last one is empty, unless it is the only one."""
    bounds = [len(x) * number * (number + 3) // ((size - 1) * (size + 2) or 1) for number in range(size)]
    return [x] if size == 1 else [*(x[start:end] for start, end in itertools.pairwise(bounds)), x[:0]]


def test_weighted_means_over_parts_of_different_lengths(comm: Any) -> None:
    models = [filled(Net()) for _ in range(2)]
    optimizers = [Momentum(model.parameters()) for model in models]
    for x in batches():
        part = uneven_parts(x, comm.size)[comm.rank]
        usual(models[0], optimizers[0], x, lambda: None)
        usual(models[1], optimizers[1], part, lambda: rw.sync_grads(models[1], weight=len(part)))  # noqa: B023
    for (name, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
    rw.assert_synced(models[1])


@each_row("dtype", [torch.bfloat16, torch.float32, torch.complex64], collective=True)
def test_weights_of_all_kinds_of_gradients(comm: Any, dtype: torch.dtype) -> None:
    """A dense one, large and small, one that rank 0 alone has, a sparse one; not-a-number where the weight is 0."""
    weights = [(3.0, 0.0, 2.0)[rank % 3] for rank in range(comm.size)]
    value = [1 + 2.0**-7 * rank if weights[rank] else float("nan") for rank in range(comm.size)]
    mean = sum(w * v for w, v in zip(weights, value, strict=True) if w) / sum(weights)
    small, large, first, sparse = (torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 40_000, 2, 4))
    for zero in (1, 0):
        for parameter in (small, large, sparse):
            parameter.grad = torch.full_like(parameter, value[comm.rank])
        sparse.grad = torch.full_like(sparse, value[comm.rank]).to_sparse()
        first.grad = torch.ones_like(first) if comm.rank == 0 else None
        rw.sync_grads([small, large, first, sparse], weight=torch.tensor(zero * weights[comm.rank]))
        for parameter in (small, large, sparse):
            assert parameter.grad is not None
            assert parameter.grad.dtype is dtype
            torch.testing.assert_close(parameter.grad.to_dense(), torch.full_like(parameter, zero * mean))
        torch.testing.assert_close(first.grad, torch.full_like(first, zero * weights[0] / sum(weights)))


def test_weights_on_some_ranks_only_are_a_mismatch(comm: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 1.0 + comm.rank)
    if comm.size > 1:
        with pytest.raises(rw.MismatchError, match=r"weight='given'\) on .*sync_grads\(\) on rank 1"):
            rw.sync_grads([parameter], **({} if comm.rank == 1 else {"weight": 2}))  # type: ignore[arg-type]
        with pytest.raises(rw.InvalidArgumentError if comm.rank == 1 else rw.RemoteRankError, match="at least 0"):
            rw.sync_grads([parameter], weight=-1 if comm.rank == 1 else 1)
    assert parameter.grad.tolist() == [1.0 + comm.rank] * 3


@each_row(
    ("option", "value", "text"),
    [
        *(("weight", value, "not a finite number") for value in (-1, float("nan"), float("inf"), True, "2", 1j)),
        ("weight", torch.ones(2), "not a finite number"),
        ("op", "max", "'mean' or 'sum'"),
        ("op", "average", "op='average' is none of"),
        ("missing", "raise", "missing='raise' is neither 'zeros' nor 'error'"),
    ],
    collective=True,
)
def test_arguments_that_cannot_be_used(comm: Any, option: str, value: Any, text: str) -> None:
    weight: Any = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(rw.InvalidArgumentError, match=text):
        rw.sync_grads([weight], **{option: value})
    if comm.size > 1:
        mine = {option: value} if comm.rank == 1 else {}
        with pytest.raises(rw.InvalidArgumentError if comm.rank == 1 else rw.RemoteRankError, match=text):
            rw.sync_grads([weight], **mine)
    rw.sync_grads([weight])


def test_a_gradient_whose_elements_share_memory_is_replaced(comm: Group) -> None:
    """By `expand` all elements are one; by `unfold`, windows overlap."""
    for shared in (torch.ones(1).expand(4, 3), torch.arange(6.0).unfold(0, 3, 1)):
        parameter = torch.nn.Parameter(torch.zeros(4, 3))
        parameter.grad = shared if comm.rank == 0 else torch.full((4, 3), 6.0)
        mean = (shared.clone() + 6.0 * (comm.size - 1)) / comm.size
        rw.sync_grads([parameter])
        assert torch.equal(parameter.grad, mean)


def test_memory_is_shared_by_expanded_and_unfolded_tensors_alone() -> None:
    plain = torch.arange(120.0).view(4, 5, 6)
    own = [plain, plain[::2], plain.permute(2, 0, 1), plain[:, 1:3, ::2], plain[:, :1].expand(4, 1, 6), plain[:0]]
    assert not any(map(is_expanded, own))
    assert all(map(is_expanded, [plain[:, :1].expand(4, 5, 6), plain.unfold(2, 3, 1), plain.view(-1).unfold(0, 9, 8)]))
