"""The public names and their signatures, compared with a recorded table: `python -m tests.test_public_api` records it.

A name that is added is recorded with the change that adds it; one that goes, or takes other arguments, breaks users.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).parent / "data" / "public-api.txt"
MODULES = (
    "rankwise",
    "rankwise.data",
    "rankwise.errors",
    "rankwise.launching",
    "rankwise.logging",
    "rankwise.topology",
    "rankwise.extend.collectives",
    "rankwise.extend.engines",
    "rankwise.extend.launchers",
    "rankwise.testing.environments",
    "rankwise.testing.fakes",
    "rankwise.compat.ignite",
    "rankwise.compat.mmcv",
    "rankwise.compat.torch_launch",
    "rankwise.compat.virtex",
    "rankwise.compat.vis4d",
)

# Classes of which users get objects, and make none.
MADE_HERE = {"Group", "Session", "Work"}
# Such classes of which other members serve this package alone.
OPAQUE = {
    "LaunchEnvironment": (
        "facts",
        "launcher",
        "rank",
        "world_size",
        "local_rank",
        "local_world_size",
        "node_rank",
        "num_nodes",
    ),
    "RecordingGroup": ("calls",),
    "Members": (
        *("rank", "ranks", "size", "settings", "values", "verify", "exchange", "all_reduce", "all_gather"),
        *("gather", "broadcast", "scatter", "all_gather_bytes", "gather_bytes", "broadcast_bytes", "scatter_bytes"),
    ),
    "Store": ("add", "check", "compare_set", "delete", "get", "set", "wait"),
}


def public_api() -> str:
    """Return the names that users import, a line each, with the signatures of functions and methods."""
    return "\n".join(itertools.chain.from_iterable(_module(name) for name in MODULES)) + "\n"


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [
        public
        for public, value in vars(module).items()
        if not public.startswith("_") and getattr(value, "__module__", None) == name
    ]
    for public in sorted(names):
        value = getattr(module, public)
        if name == "rankwise.errors" and not inspect.isclass(value):
            continue  # words for messages
        is_made_here = getattr(value, "__name__", "") in MADE_HERE | OPAQUE.keys()
        yield f"{name}.{public}{'' if is_made_here else _signature(value)}"
        if inspect.isclass(value):
            yield from (f"{name}.{public}.{member}" for member in _members(value))


def _members(cls: type) -> Iterator[str]:
    for member in sorted(OPAQUE.get(cls.__name__, [name for name in dir(cls) if not name.startswith("_")])):
        defined_by = next(base for base in cls.__mro__ if member in vars(base))
        value = inspect.getattr_static(cls, member, None)
        if defined_by.__module__.partition(".")[0] == "rankwise" and not isinstance(value, classmethod):
            yield f"{member}{_signature(value)}"


def _signature(value: object) -> str:
    """Return the parameters and their defaults; "" of what cannot be called."""
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except ValueError:  # an exception that takes the arguments of its built-in base
        return ""
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_public_names_and_signatures_are_the_recorded_ones() -> None:
    """In a new interpreter: plugins and other tests import submodules."""
    command = [sys.executable, "-c", "from tests.test_public_api import public_api; print(public_api(), end='')"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert run.stdout.splitlines() == TABLE.read_text().splitlines()


if __name__ == "__main__":
    TABLE.write_text(public_api())
