"""The drop-in for Ignite on XLA devices: joining, data loaders, models, optimizers and launches."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch_xla.runtime as xr
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset
from torch_xla.debug import metrics

import rankwise as rw
import rankwise.compat.ignite as idist
from rankwise.compat.ignite import utils
from rankwise.compat.ignite.comp_models.xla import _XlaDistModel
from rankwise.errors import RankFailedError
from tests.xla.cpu_devices import support_collectives
from tests.xla.device_ranks import DEVICES

pytestmark = pytest.mark.usefixtures("torch_random")

LENGTH = 16


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    yield
    idist.finalize()


@pytest.mark.ranks(1, 2, 4)
def test_ranks_of_torch_xla_are_found() -> None:
    """Getters do not join: only the first rank calls them."""
    if xr.global_ordinal() == 0:
        assert (idist.get_rank(), idist.get_world_size(), idist.get_local_rank()) == (0, DEVICES, 0)
        assert (idist.get_nproc_per_node(), idist.get_nnodes(), idist.get_node_rank()) == (DEVICES, 1, 0)
    assert (idist.backend(), idist.model_name()) == ("xla-tpu", "xla-dist")
    assert idist.device().type == "xla"
    assert isinstance(utils._model, _XlaDistModel)
    assert isinstance(_XlaDistModel.create_from_context(), _XlaDistModel)
    rank = torch.tensor([float(idist.get_rank())], device=idist.device())
    assert idist.all_gather(rank).tolist() == [float(other) for other in range(DEVICES)], "the first collective joins"
    idist.barrier()
    idist.finalize()


@pytest.mark.ranks(1, 2, 4)
def test_initialize_joins() -> None:
    idist.initialize("xla-tpu", timeout=100)
    assert utils._model._init_method == "env://"
    assert (rw.get_world_size(), rw.backend(), idist.backend()) == (DEVICES, "xla", "xla-tpu")
    assert idist.get_rank() == idist.get_local_rank() == xr.global_ordinal()
    with pytest.raises(RuntimeError, match=r"default one is already initialized .*call finalize"):
        idist.initialize("xla-tpu")
    assert idist.all_reduce(1) == DEVICES
    idist.barrier()
    idist.finalize()
    with pytest.raises(ValueError, match="initialize takes no rank, world_size with 'xla-tpu'"):
        idist.initialize("xla-tpu", rank=0, world_size=1)
    with pytest.raises(ValueError, match="initialize takes no timout"):
        idist.initialize("xla-tpu", timout=1)
    with idist.Parallel("xla-tpu") as parallel:
        parallel.run(lambda _: idist.barrier())
        idist.barrier()


@pytest.mark.ranks(2, 4)
def test_a_failure_in_the_block_is_reported_to_the_others() -> None:
    error: type[Exception] = ValueError if xr.global_ordinal() == 1 else rw.RankwiseError
    with pytest.raises(error, match="only here"), idist.Parallel("xla-tpu") as parallel:
        parallel.run(_raise_on_rank_one)


def _raise_on_rank_one(local_rank: int) -> None:
    if local_rank == 1:
        raise ValueError("only here")
    idist.barrier()


_has_failed = threading.Event()


@pytest.mark.ranks(4)
def test_a_member_that_does_not_come_is_named() -> None:
    idist.initialize("xla-tpu", timeout=2)
    if idist.get_rank() == 0:
        _has_failed.clear()
    idist.barrier()
    if idist.get_rank() == 0:
        with pytest.raises(rw.CollectiveTimeoutError, match=r"within 2 s: ranks \[1\] did not come"):
            idist.all_reduce(1, group=[0, 1])
        _has_failed.set()
    assert _has_failed.wait(200)
    assert idist.all_reduce(1, group=[0, 1]) == (2 if idist.get_rank() < 2 else 1), "the next call works"
    idist.barrier()
    idist.finalize()


@pytest.mark.ranks(1, 2, 4)
def test_a_loader_shares_the_data_out(session: rw.Session) -> None:
    data = TensorDataset(torch.arange(LENGTH, device="cpu"))
    with pytest.warns(UserWarning, match="xla support and pin_memory") if DEVICES == 1 else _nothing():
        loader = idist.auto_dataloader(data, batch_size=2 * DEVICES, shuffle=False, pin_memory=DEVICES == 1)
    assert len(loader) == LENGTH // DEVICES // 2
    batches = [batch for (batch,) in loader]
    assert {batch.device.type for batch in batches} == ({"cpu"} if DEVICES == 1 else {"xla"})
    mine = [int(value) for batch in batches for value in batch.cpu()]
    assert mine == list(range(session.rank, LENGTH, DEVICES))
    if DEVICES > 1:
        assert isinstance(loader.sampler, DistributedSampler)
        assert type(loader) is idist.auto._MpDeviceLoader


def _nothing() -> threading.Lock:
    """Return a context manager that does nothing."""
    return threading.Lock()


@pytest.mark.ranks(1, 2, 4)
def test_a_model_gets_the_parameters_of_rank_zero(session: rw.Session) -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(session.rank + 1.0)
    adapted = idist.auto_model(model, sync_bn=True, find_unused_parameters=True)
    assert adapted is model
    assert next(adapted.parameters()).device == idist.device()
    assert adapted.weight.tolist() == [[1.0, 1.0]]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, *, steps: int = 3) -> list[float]:
    """Return the weights after some steps with a scheduler."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        scheduler.step()
    weights: list[float] = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()]).tolist()
    return weights


def new_model() -> nn.Linear:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, -0.2, 0.3]]))
        model.bias.fill_(0.5)
    return model


@pytest.mark.ranks(1, 2, 4)
def test_steps_average_the_gradients(session: rw.Session) -> None:
    inputs = torch.arange(LENGTH * 3, dtype=torch.float32, device="cpu").reshape(LENGTH, 3) / 10
    with torch.device("cpu"):
        alone = new_model()
        expected = trained(alone, torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9), inputs)
        model = new_model()
    idist.auto_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    adapted = idist.auto_optim(optimizer)
    assert type(adapted).__name__ == "SGD"
    assert isinstance(adapted, torch.optim.SGD)
    assert adapted.wrapped_optimizer is optimizer  # type: ignore[attr-defined]
    mine = inputs[session.rank :: DEVICES].to(idist.device())
    assert trained(model, adapted, mine) == pytest.approx(expected, abs=1e-4)
    state = adapted.state_dict()
    assert state["param_groups"][0]["lr"] == pytest.approx(0.01 / 8)
    adapted.load_state_dict(state)
    before = model.weight.detach().cpu().clone()

    def closure() -> torch.Tensor:
        adapted.zero_grad()
        loss: torch.Tensor = model(mine).square().mean()
        loss.backward()
        return loss.detach()

    assert float(adapted.step(closure)) > 0
    after = model.weight.detach().cpu()
    assert not torch.equal(before, after)
    assert all(torch.equal(after, other) for other in idist.all_gather([after])[0:1][0])


@pytest.mark.ranks(1, 2, 4)
def test_steps_compile_nothing_from_the_second_on(session: rw.Session) -> None:
    with torch.device("cpu"):
        model = new_model()
    idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))
    inputs = torch.ones(4, 3, device=idist.device())
    compiled = []
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        idist.barrier()
        compiled.append(metrics.counter_value("UncachedCompile"))
        idist.barrier()
    assert compiled[2:] == [compiled[2]] * 3, "the first step makes the gradients"


def in_spawned_rank(local_rank: int, expected: int, *, offset: int) -> None:
    """The checks of a rank that `spawn` has started."""
    support_collectives()
    idist.barrier()
    assert (idist.get_world_size(), idist.get_local_rank()) == (expected, local_rank)
    assert isinstance(utils._model, _XlaDistModel)
    own = torch.tensor([float(local_rank + offset)], device=idist.device())
    assert idist.all_reduce(own).tolist() == [float(sum(range(offset, offset + expected)))]
    idist.barrier()


def test_spawn_starts_a_rank_on_each_device(no_leftovers: None) -> None:
    idist.spawn("xla-tpu", in_spawned_rank, (DEVICES,), {"offset": 1}, nproc_per_node=DEVICES, start_method="fork")
    with idist.Parallel("xla-tpu", nproc_per_node=DEVICES) as parallel:
        parallel.run(in_spawned_rank, DEVICES, offset=2)
    _XlaDistModel.spawn(in_spawned_rank, (DEVICES,), {"offset": 3}, nproc_per_node=DEVICES)


def test_a_failing_rank_is_named(no_leftovers: None) -> None:
    with pytest.raises(RankFailedError, match=f"rank {DEVICES - 1} of {DEVICES} .* only there"):
        idist.spawn("xla-tpu", _raise_on_rank, (DEVICES - 1,), nproc_per_node=DEVICES)
    with pytest.raises(ValueError, match="XLA device"):
        idist.spawn("xla-tpu", print, (), nproc_per_node=DEVICES + 1)
    with pytest.raises(ValueError, match="Backend should be one of"):
        _XlaDistModel.spawn(print, (), backend="gloo")


def _raise_on_rank(local_rank: int, failing: int) -> None:
    if local_rank == failing:
        raise OSError("only there")
    idist.barrier()


def test_a_process_alone_has_the_xla_model(no_leftovers: None) -> None:
    """As with Ignite, where torch_xla is installed; the main thread is no rank of this world of several."""
    assert idist.has_xla_support
    assert "xla-tpu" in idist.available_backends()
    assert [model.name for model in idist.registered_computation_models] == ["serial", "native-dist", "xla-dist"]
    if DEVICES == 1:
        assert (idist.model_name(), idist.backend(), idist.get_rank(), idist.get_world_size()) == (
            *("xla-dist", "xla-tpu"), 0, 1,
        )  # fmt: skip
        assert idist.device().type == "xla"
        assert idist.all_gather(torch.tensor(3, device=idist.device())).tolist() == [3]
        assert idist.all_reduce(5) == 5
    idist.initialize("gloo")
    assert (idist.model_name(), idist.backend(), idist.device().type) == ("native-dist", "gloo", "cpu")
    assert isinstance(idist.auto_model(nn.Linear(1, 1)), nn.Linear)
    loader = idist.auto_dataloader(TensorDataset(torch.arange(3)), shuffle=False)
    assert [int(value) for (value,) in loader] == [0, 1, 2]
