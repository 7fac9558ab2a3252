"""What a test may leave behind in a process, so that the next one would find it."""

from __future__ import annotations

import contextlib
import operator
import os
import random
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from rankwise._session.current import opened_session

# Pytest's own, which change with every test, and what torch sets when it loads its compiler.
_VARIABLES_NOT_WATCHED: Final = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION", "TORCHINDUCTOR_")
_NOT_WATCHED: Final = ("_pytest", "pytest", "_pluggy", "pluggy", "rankwise.testing", "faulthandler")
_CODE: Final = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
# Set when a process group is opened, and read when a process fails.
_OF_TORCH: Final = frozenset({("sys", "excepthook")})
# A thread that is about to end may take so long.
_THREAD_SECONDS: Final = 0.1
# SIGALRM is the timeout plugin's, SIGCHLD torch's once a loader has had workers.
_SIGNALS: Final = signal.valid_signals() - {signal.SIGALRM, signal.SIGCHLD}


class RandomState:
    """The state of the random generators."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._random = random.getstate()
        self._torch = torch.random.get_rng_state()
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Put it back."""
        random.setstate(self._random)
        torch.random.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class LeakDetector:
    """This process as it was when a test began; `left` says what has changed since.

    What a fixture of a class, module or session changes is none of the test's: it may stay, and may be put back.
    """

    def __init__(self, project: Path, random_state: RandomState) -> None:
        """Prepare.

        Args:
            project: The folder of the project that is tested. In its modules every name counts, in others code alone,
                since many keep what they have computed.
            random_state: What the random generators begin each test with.
        """
        self._project = str(project)
        self._random = random_state
        self._threads: set[threading.Thread] = set()
        self._facts: dict[str, object] = {}
        # By name: other values than the last that are none of a test's, and of each module the values that it had.
        self._allowed: dict[str, list[object]] = {}
        self._modules: dict[str, dict[str, object]] = {}
        self._first: dict[str, dict[str, object]] = {}

    def settle(self) -> None:
        """Take what is now in modules for as it should be."""
        self._patched()

    def forget(self) -> None:
        """Allow nothing any more, when the last fixture of wider scope has ended."""
        self._allowed.clear()
        self._first.clear()

    def begin(self) -> None:
        """Remember how a test begins, and let random generators begin as ever."""
        self._random.restore()
        self._facts = _facts()
        self._threads = set(threading.enumerate())

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Let what changes in the block stay, or be put back later."""
        before = _facts()
        yield
        after = _facts()
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                self._allowed.setdefault(name, []).extend([before.get(name), after.get(name)])
        self._threads |= set(threading.enumerate())
        self._patched()

    def left(self) -> tuple[str, ...]:
        """Return what has changed, in words."""
        now = _facts()
        left = []
        for name in sorted(now.keys() | self._facts.keys()):
            value = now.get(name)
            if value != self._facts.get(name) and value not in self._allowed.get(name, ()):
                left.append(f"{name}: {_change(self._facts.get(name), value)}")
        threads = {thread.name for thread in threading.enumerate() if thread not in self._threads and _stays(thread)}
        if threads:
            left.append(f"threads: {', '.join(sorted(threads))}")
        patched = self._patched()
        if patched:
            left.append(f"changed: {', '.join(patched)}")
        return tuple(left)

    def _patched(self) -> list[str]:
        """Return what was replaced in modules since this was last asked."""
        patched = []
        for name, module in list(sys.modules.items()):
            known = self._modules.get(name)
            if not isinstance(module, types.ModuleType):
                patched += [f"sys.modules[{name!r}]"] * (known is not None)
                self._modules.pop(name, None)
                continue
            if known is not None and _is_as_it_was(module, known):
                continue
            if known is not None:
                first = self._first.setdefault(name, known)
                every = self._is_projects(module)
                patched += [f"{name}.{variable}" for variable in _changed(module, known, first, every=every)]
            if not name.startswith(_NOT_WATCHED):
                # With the values, so that no other object gets the identity of one.
                self._modules[name] = dict(vars(module))
        return patched

    def _is_projects(self, module: types.ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and file.startswith(self._project) and "site-packages" not in file


def _is_as_it_was(module: types.ModuleType, known: Mapping[str, object]) -> bool:
    """Return whether every name of a module stands for the same object as before: of 80,000 names in 8 ms."""
    now = vars(module)
    return len(now) == len(known) and all(map(operator.is_, now.values(), known.values()))


def _changed(
    module: types.ModuleType, known: Mapping[str, object], first: Mapping[str, object], *, every: bool
) -> list[str]:
    """Return the names that stand for something else than before, and than at first; of code alone, if not for all."""
    now = vars(module)
    gone = object()
    return [
        name
        for name, value in known.items()
        if not any(now.get(name, gone) is earlier for earlier in (value, first.get(name, value)))
        and (every or (isinstance(value, _CODE) and not _is_own(module, now.get(name))))
        and not name.startswith(("__", "@"))
        and (module.__name__, name) not in _OF_TORCH
    ]


def _is_own(module: types.ModuleType, value: object) -> bool:
    """Return whether a package has replaced its own code by its own, as torch does when it loads its compiler."""
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] == module.__name__.partition(".")[0]


def _facts() -> dict[str, object]:
    variables = {
        f"environment: {name}": value
        for name, value in os.environ.items()
        if not name.startswith(_VARIABLES_NOT_WATCHED)
    }
    handlers = {f"handler of signal {number}": signal.getsignal(number) for number in _SIGNALS}
    streams = {f"sys.{name}": _stream(getattr(sys, name)) for name in ("stdin", "stdout", "stderr")}
    return {
        **variables,
        **handlers,
        **streams,
        "working directory": _working_directory(),
        "search path": {str(entry) for entry in sys.path},  # pytest itself puts folders of packages first
        "process group": torch.distributed.is_initialized(),
        "session": opened_session() is not None,
        "children": _children(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's threads": torch.get_num_threads(),
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    }


def _stream(stream: object) -> str:
    state = "closed" if getattr(stream, "closed", False) else "open"
    return f"{state} {type(stream).__name__} {id(stream):#x}"


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "deleted"


def _stays(thread: threading.Thread) -> bool:
    """Return whether a thread is not about to end."""
    thread.join(_THREAD_SECONDS)
    return thread.is_alive()


def _children() -> set[int]:
    """Return this process's children, where the kernel tells."""
    children: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            children.update(map(int, task.read_text().split()))
    return children


def _change(before: Any, after: Any) -> str:  # noqa: ANN401 - of whatever kind a fact is
    if isinstance(before, set) and isinstance(after, set):
        return ", ".join(str(value) for value in sorted(after ^ before))
    return f"{before!r:.60} became {after!r:.60}"
