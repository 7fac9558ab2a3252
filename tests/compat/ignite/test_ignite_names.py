"""The names of ignite.distributed: complete, with the original's signatures and its results alone."""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import rankwise as rw
import rankwise.compat.ignite as idist
from tests.compat.ignite.original import ignite, original, without_useless
from tests.lanes import variants
from tests.session.worlds import clean_environ
from tests.tables import each_row

# Recorded from PyTorch-Ignite 0.5.5, without annotations.
SIGNATURES = {
    "DistributedProxySampler": "(sampler, num_replicas=None, rank=None)",
    "Parallel": (
        "(backend=None, nproc_per_node=None, nnodes=None, node_rank=None, master_addr=None, master_port=None,"
        " init_method=None, **spawn_kwargs)"
    ),
    "all_gather": "(tensor, group=None)",
    "all_gather_tensors_with_shapes": "(tensor, shapes, group=None)",
    "all_reduce": "(tensor, op='SUM', group=None)",
    "auto_dataloader": "(dataset, **kwargs)",
    "auto_model": "(model, sync_bn=False, **kwargs)",
    "auto_optim": "(optimizer, **kwargs)",
    "available_backends": "()",
    "backend": "()",
    "barrier": "()",
    "broadcast": "(tensor, src=0, safe_mode=False)",
    "device": "()",
    "finalize": "()",
    "get_local_rank": "()",
    "get_nnodes": "()",
    "get_node_rank": "()",
    "get_nproc_per_node": "()",
    "get_rank": "()",
    "get_world_size": "()",
    "hostname": "()",
    "initialize": "(backend, **kwargs)",
    "model_name": "()",
    "new_group": "(ranks, **kwargs)",
    "one_rank_first": "(rank=0, local=False)",
    "one_rank_only": "(rank=0, with_barrier=False)",
    "set_local_rank": "(index)",
    "show_config": "()",
    "spawn": "(backend, fn, args, kwargs_dict=None, nproc_per_node=1, **kwargs)",
    "sync": "(temporary=False)",
}
VALUES = {"has_hvd_support", "has_native_dist_support", "has_xla_support", "registered_computation_models"}


def plain_signature(value: object) -> str:
    """Return a signature without annotations."""
    signature = inspect.signature(value)  # type: ignore[arg-type]  # it is callable, or this fails
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(parameters))


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    yield
    idist.finalize()


@each_row("name", SIGNATURES)
def test_signatures_are_the_recorded_ones(name: str) -> None:
    assert plain_signature(getattr(idist, name)) == SIGNATURES[name]


@each_row("name", SIGNATURES)
def test_what_is_recorded_is_what_ignite_has(name: str) -> None:
    assert plain_signature(getattr(original, name)) == SIGNATURES[name]


@each_row("name", sorted(set(SIGNATURES) - {"DistributedProxySampler", "Parallel"}))
def test_functions_say_whether_they_talk(name: str) -> None:
    assert re.search(r"^(Local|Collective)\b", inspect.getdoc(getattr(idist, name)) or "", re.MULTILINE)


def test_no_name_is_missing() -> None:
    modules = (original.auto, original.launcher, original.utils)
    theirs = {name for module in modules for name in module.__all__}
    assert theirs == set(SIGNATURES) | VALUES
    assert theirs | {"install"} == set(idist.__all__)
    for module in ("auto", "comp_models", "launcher", "utils"):
        names = getattr(getattr(original, module), "__all__", ["has_xla_support"])
        assert all(hasattr(getattr(idist, module), name) for name in names)
    with pytest.raises(AttributeError, match="nothing"):
        idist.nothing  # type: ignore[attr-defined]  # noqa: B018 - that is the point


def test_what_is_there_is_what_the_original_has_without_the_extras() -> None:
    for name in ("has_hvd_support", "has_native_dist_support", "has_xla_support"):
        assert getattr(idist, name) is getattr(original, name)
    assert idist.available_backends() == without_useless(original.available_backends())
    assert [(model.name, model.available_backends) for model in idist.registered_computation_models] == [
        (model.name, without_useless(model.available_backends)) for model in original.registered_computation_models
    ]
    for backend in ("xla-tpu", "horovod", "Gloo", "", None, 3):
        for module in (idist, original):
            with pytest.raises(ValueError, match=r"Backend should be one of"):
                module.initialize(backend)
            with pytest.raises(ValueError, match=r"Backend should be one of"):
                module.spawn(backend, print, ())
    for module in (idist, original):
        with pytest.raises(ValueError, match=r"Unknown backend 'horovod'\. Available backends: \(.*'gloo'"):
            module.Parallel(backend="horovod")


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # by the original
def test_every_name_works_alone(no_leftovers: None, torch_random: None, capsys: pytest.CaptureFixture[str]) -> None:
    tensor, model, data = torch.ones(2), nn.Identity(), range(4)
    for module in (idist, original):
        assert module.get_rank() == module.get_local_rank() == module.get_node_rank() == 0
        assert module.get_world_size() == module.get_nproc_per_node() == module.get_nnodes() == 1
        assert (module.backend(), module.model_name()) == (None, "serial")
        assert module.hostname() == rw.hostname()
        module.sync()
        assert module.all_reduce(tensor) is tensor
        assert module.all_reduce(5, op="MAX", group=[0]) == 5
        assert module.all_gather(tensor) is tensor
        assert module.all_gather(5) == [5]
        assert module.all_gather("é") == ["é"]
        assert module.all_gather({"a": 1}) == [{"a": 1}]
        assert [part.tolist() for part in module.all_gather_tensors_with_shapes(tensor, [[2]])] == [[1.0, 1.0]]
        assert module.broadcast(tensor) is tensor
        assert module.broadcast("é", safe_mode=True) == "é"
        with pytest.raises(ValueError, match="None"):
            module.broadcast(None)
        with pytest.raises(ValueError, match=r"list of int"):
            module.new_group("ab")
        assert module.new_group([0]) == [0]
        module.barrier()
        assert module.one_rank_only()(lambda: 3)() == 3
        assert module.one_rank_only(rank=1, with_barrier=True)(lambda: 3)() is None
        with module.one_rank_first():
            pass
        with pytest.raises(ValueError, match=r"rank should be between 0 and 0, but given 1"), module.one_rank_first(1):
            pass
        assert module.auto_model(model) is model
        assert module.auto_optim("anything") == "anything"
        loader = module.auto_dataloader(data, batch_size=2)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        sampler = torch.utils.data.SequentialSampler(data)
        assert list(module.DistributedProxySampler(sampler, num_replicas=2, rank=1)) == [1, 3]
        assert module.device() == original.device()
        module.finalize()
    assert list(idist.DistributedProxySampler(sampler)) == [0, 1, 2, 3], "the original wants a process group"
    idist.set_local_rank(0)
    idist.show_config()
    shown = {line.partition("ignite.distributed.utils INFO: ")[2] for line in capsys.readouterr().err.splitlines()}
    assert {"distributed configuration: serial", "backend: None", "world size: 1"} <= shown


def test_a_program_may_set_the_loggers_up(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("ignite.distributed.utils")
    before = logger.level
    logger.setLevel(logging.WARNING)
    idist.show_config()
    logger.setLevel(before)
    assert capsys.readouterr().err == ""


def test_parallel_without_a_backend_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with idist.Parallel() as parallel:
        parallel.run(print, "alone", sep="-")
    assert capsys.readouterr().out == "0-alone\n"
    for name in ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"):
        with pytest.raises(ValueError, match=f"If backend is None, argument '{name}' should be also None"):
            idist.Parallel(**{name: 1})  # type: ignore[arg-type]  # any of them


def test_a_late_installation_is_refused() -> None:
    with pytest.raises(ValueError, match="before the first import of ignite"):
        idist.install()
    assert ignite.distributed is original


@pytest.mark.parametrize(
    "program", variants(["ignite_stands_in.py", "ignite_is_missing.py"], fast=["ignite_is_missing.py"])
)
def test_installation(program: str, tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "programs" / program
    ended = subprocess.run(
        [sys.executable, str(path)],
        env=clean_environ(TMPDIR=str(tmp_path)), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr
    assert ("ignite.distributed.utils INFO: world size: 1\n" in ended.stderr) is (program == "ignite_stands_in.py")
