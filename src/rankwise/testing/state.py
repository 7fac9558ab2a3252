"""What a test may leave behind in a process, so that the next one would find it."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from rankwise.session.current import opened_session

# Pytest's own, and those of the plugin, which change with every test.
_OF_PYTEST: Final = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION")
_NOT_WATCHED: Final = ("_pytest", "pytest", "_pluggy", "pluggy", "rankwise.testing", "faulthandler")
_CODE: Final = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
# Set when a process group is opened, and read when a process fails.
_OF_TORCH: Final = frozenset({("sys", "excepthook")})
# A thread that is about to end may take so long.
_THREAD_SECONDS: Final = 0.1
# SIGALRM is the timeout plugin's.
_SIGNALS: Final = signal.valid_signals() - {signal.SIGALRM}


class State:
    """This process as it was when a test began; `left` says what has changed since."""

    def __init__(self, project: Path) -> None:
        """Remember the modules, and the state of the random generators.

        Args:
            project: The folder of the project that is tested. In its modules every name counts, in others code alone,
                since many keep what they have computed.
        """
        self._project = str(project)
        self._facts: dict[str, object] = {}
        self._threads: set[threading.Thread] = set()
        self._random = _random_state()
        self._modules: dict[str, _Names] = {}
        self._remember_modules()

    def begin(self) -> None:
        """Remember the rest, before a test."""
        self._facts = _facts()
        self._threads = set(threading.enumerate())

    def left(self) -> tuple[str, ...]:
        """Return what has changed, in words, and put the random generators back, which any test uses."""
        _restore_random(self._random)
        now = _facts()
        left = [f"{name}: {_change(self._facts[name], now[name])}" for name in now if now[name] != self._facts[name]]
        threads = {thread.name for thread in threading.enumerate() if thread not in self._threads and _stays(thread)}
        if threads:
            left.append(f"threads: {', '.join(sorted(threads))}")
        left += self._patched()
        if not left:
            self._remember_modules()
        return tuple(left)

    def _remember_modules(self) -> None:
        for name, module in list(sys.modules.items()):
            if isinstance(module, types.ModuleType) and not name.startswith(_NOT_WATCHED):
                known = self._modules.get(name)
                if known is None or not known.is_as_it_was(module):
                    self._modules[name] = _Names(module)

    def _patched(self) -> list[str]:
        patched = []
        for name, known in self._modules.items():
            module = sys.modules.get(name)
            if module is None or known.is_as_it_was(module):
                continue
            changed = known.changed(module, every=self._is_projects(module))
            patched += [f"{name}.{variable}" for variable in changed]
        return [f"changed: {', '.join(patched)}"] if patched else []

    def _is_projects(self, module: types.ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and file.startswith(self._project) and "site-packages" not in file


class _Names:
    """The names of a module, as they were."""

    def __init__(self, module: types.ModuleType) -> None:
        self._values = dict(vars(module))  # keeps the values, so that no other object gets the identity of one
        self._identities = tuple(map(id, self._values.values()))

    def is_as_it_was(self, module: types.ModuleType) -> bool:
        return tuple(map(id, vars(module).values())) == self._identities

    def changed(self, module: types.ModuleType, *, every: bool) -> list[str]:
        now = vars(module)
        return [
            name
            for name, value in self._values.items()
            if now.get(name, self) is not value
            and (every or isinstance(value, _CODE))
            and not name.startswith(("__", "@"))
            and (module.__name__, name) not in _OF_TORCH
        ]


def _facts() -> dict[str, object]:
    return {
        "environment": {name: value for name, value in os.environ.items() if name not in _OF_PYTEST},
        "working directory": str(Path.cwd()),
        "search path": set(sys.path),  # pytest itself puts folders of packages first
        "process group": torch.distributed.is_initialized(),
        "session": opened_session() is not None,
        "children": _children(),
        "signal handlers": {number: signal.getsignal(number) for number in _SIGNALS},
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's threads": torch.get_num_threads(),
    }


def _stays(thread: threading.Thread) -> bool:
    """Return whether a thread is not about to end."""
    thread.join(_THREAD_SECONDS)
    return thread.is_alive()


def _children() -> set[int]:
    """Return this process's children, where the kernel tells."""
    try:
        lists = [(task / "children").read_text() for task in Path("/proc/self/task").iterdir()]
    except OSError:
        return set()
    return {int(pid) for text in lists for pid in text.split()}


def _change(before: object, after: object) -> str:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return ", ".join(sorted(str(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key)))
    if isinstance(before, set) and isinstance(after, set):
        return ", ".join(str(value) for value in sorted(after ^ before))
    return f"{before!r:.60} became {after!r:.60}"


def _random_state() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "random": random.getstate(),
        "torch": torch.random.get_rng_state(),
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def _restore_random(state: Mapping[str, Any]) -> None:
    random.setstate(state["random"])
    torch.random.set_rng_state(state["torch"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
