"""The fake torch_xla of the default tests has nothing that torch_xla lacks, and no other signatures."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch_xla

from tests.xla.fake_devices import FAKE

MODULES = sorted(
    ".".join(path.relative_to(FAKE).with_suffix("").parts).removesuffix(".__init__")
    for path in Path(FAKE).rglob("*.py")
    if path.name != "_XLAC.py"
)
# Names of the fake that tests alone use, and names that torch_xla had before version 2.9 and has no more.
OWN_STATE = {"initialize", "reset", "exchange", "state", "devices", "replicated", "calls", "State"}
REMOVED = {"torch_xla.core.xla_model": ("get_ordinal", "xrt_world_size"), "torch_xla.runtime": ("using_pjrt",)}


def fake_module(name: str) -> ModuleType:
    """Import a module of the fake beside the one of torch_xla, which its own imports lead to."""
    path = Path(FAKE, *name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"fake_{name.replace('.', '_')}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_functions(module: ModuleType) -> dict[str, Callable[..., object]]:
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    }


@pytest.mark.parametrize("name", MODULES)
def test_every_function_of_the_fake_is_one_of_torch_xla(name: str) -> None:
    real = importlib.import_module(name)
    for function, fake in own_functions(fake_module(name)).items():
        assert parameters(fake) == parameters(getattr(real, function)), function


def parameters(function: Callable[..., object]) -> dict[str, tuple[object, object]]:
    return {name: (one.default, one.kind) for name, one in inspect.signature(function).parameters.items()}


def test_the_runtime_has_the_names_of_the_fake() -> None:
    fake = fake_module("torch_xla._XLAC")
    for name in own_functions(fake).keys() - OWN_STATE:
        assert callable(getattr(torch_xla._XLAC, name)), name


@pytest.mark.parametrize("name", REMOVED)
def test_names_that_torch_xla_has_removed_are_not_in_the_fake(name: str) -> None:
    real, fake = importlib.import_module(name), fake_module(name)
    for removed in REMOVED[name]:
        assert not hasattr(real, removed)
        assert not hasattr(fake, removed)


def test_positions_of_one_process_are_as_in_the_fake() -> None:
    """What `torch_xla.runtime` returns on one host does not depend on the kind of devices."""
    fake = fake_module("torch_xla.runtime")
    real = importlib.import_module("torch_xla.runtime")
    for name in ("process_index", "process_count", "local_process_count", "host_index"):
        assert getattr(fake, name)() == getattr(real, name)(), name
