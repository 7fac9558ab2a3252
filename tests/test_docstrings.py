"""Docstrings of public names: they say Local or Collective, and their examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import rankwise as rw

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(rw.__path__, "rankwise.") if "testing" not in module.name
)
FUNCTIONS = [name for name in rw.__all__ if inspect.isfunction(getattr(rw, name))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    with torch.random.fork_rng():
        failed, _ = doctest.testmod(module, verbose=False)
    assert failed == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_say_whether_they_talk(name: str) -> None:
    text = inspect.getdoc(getattr(rw, name)) or ""
    assert re.search(r"^(Local|Collective)\b", text, re.MULTILINE), text
    assert re.match(r"[A-Z][^\n]*", text)
    parameters = inspect.signature(getattr(rw, name)).parameters
    assert (
        not parameters
        or name in {"gather", "rank_zero_only", "all_reduce"}
        or "Args:" in text
        or set(parameters) == {"group"}
    )


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__ or not Path(str(module.__file__)).read_text().strip()
