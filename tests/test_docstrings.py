"""Docstrings of public names: they say Local or Collective, and their examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import logging
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import rankwise as rw

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(rw.__path__, "rankwise.") if "testing" not in module.name
)
FUNCTIONS = {name: getattr(rw, name) for name in rw.__all__ if inspect.isfunction(getattr(rw, name))}
WITHOUT_ARGS = {"gather", "rank_zero_only", "all_reduce"}  # their arguments are in the text


@pytest.mark.slow
def test_examples_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which a part of torch that DDP imports would set
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else its bars would leave a thread
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))  # one example adds some
    failed = {}
    for name in MODULES:
        with torch.random.fork_rng():
            failed[name] = doctest.testmod(importlib.import_module(name), verbose=False).failed
    assert {name: count for name, count in failed.items() if count} == {}, "the output above has their examples"


def test_public_functions_say_whether_they_talk() -> None:
    texts = {name: inspect.getdoc(function) or "" for name, function in FUNCTIONS.items()}
    silent = [name for name, text in texts.items() if not re.search(r"^(Local|Collective)\b", text, re.MULTILINE)]
    assert silent == [], "a line that begins with Local or Collective"
    assert [name for name, text in texts.items() if not re.match(r"[A-Z]", text)] == []


def test_public_functions_describe_their_arguments() -> None:
    with_arguments = {
        name
        for name, function in FUNCTIONS.items()
        if set(inspect.signature(function).parameters) - {"group"} and name not in WITHOUT_ARGS
    }
    assert [name for name in sorted(with_arguments) if "Args:" not in (inspect.getdoc(FUNCTIONS[name]) or "")] == []


def test_public_functions_have_an_example() -> None:
    texts = {name: inspect.getdoc(function) or "" for name, function in FUNCTIONS.items()}
    assert [name for name, text in texts.items() if not re.search(r"^Example:$", text, re.MULTILINE)] == []


def test_every_public_module_says_what_it_is() -> None:
    public = [name for name in MODULES if not any(part.startswith("_") for part in name.split("."))]
    assert [name for name in public if not importlib.import_module(name).__doc__] == []
