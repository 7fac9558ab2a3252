"""Detection of state that a test leaves behind in a process, and that would affect the next test."""

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

from rankwise._comm.control.board import BOARD_THREAD
from rankwise._session.current import opened_session
from rankwise.testing._plugin.timeouts import THREAD_EXIT_SECONDS

# Variables that pytest changes with every test, and that torch sets when it loads its compiler.
_VARIABLES_NOT_WATCHED: Final = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION", "TORCHINDUCTOR_")
_NOT_WATCHED: Final = ("_pytest", "pytest", "_pluggy", "pluggy", "rankwise.testing", "faulthandler")
_CODE: Final = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
# Set by torch when a process group is opened, and read when a process fails.
_SET_BY_TORCH: Final = frozenset({("sys", "excepthook")})
# pytest-timeout handles SIGALRM, and torch SIGCHLD once a DataLoader has had workers.
_WATCHED_SIGNALS: Final = signal.valid_signals() - {signal.SIGALRM, signal.SIGCHLD}


class RandomState:
    """The state of the random generators."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._random = random.getstate()
        self._torch = torch.random.get_rng_state()
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Restore the state."""
        random.setstate(self._random)
        torch.random.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class LeakDetector:
    """The state of this process at the start of a test, to be compared with that at its end.

    Changes by fixtures of a class, module or session are not leaks of a test: they may stay, and may be undone later.
    """

    def __init__(self, project: Path, random_state: RandomState) -> None:
        """Prepare for tests.

        Args:
            project: The folder of the project that is tested. In its modules every name is compared. In others only
                functions and classes are, since many modules cache values.
            random_state: The state of the random generators at the start of each test.
        """
        self._project = str(project)
        self._random = random_state
        self._threads: set[threading.Thread] = set()
        self._state: dict[str, object] = {}
        # The values, by name, that fixtures of wider scope have set or found.
        self._allowed: dict[str, list[object]] = {}
        # The contents of modules when they were last compared, and before their first change since `forget_allowed`.
        # The second ones are allowed too: a fixture that ends with this test may have restored them.
        self._modules: dict[str, dict[str, object]] = {}
        self._first: dict[str, dict[str, object]] = {}

    def accept_modules(self) -> None:
        """Take the present contents of modules as the state to compare with."""
        self._changed_modules()

    def forget_allowed(self) -> None:
        """Allow no changes any more; called when the last fixture of wider scope has ended."""
        self._allowed.clear()
        self._first.clear()

    def begin(self) -> None:
        """Store the state at the start of a test, and reset the random generators."""
        self._random.restore()
        self._state = _process_state()
        self._threads = set(threading.enumerate())

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow the changes of the block to stay, and to be undone later."""
        before = _process_state()
        yield
        after = _process_state()
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                self._allowed.setdefault(name, []).extend([before.get(name), after.get(name)])
        self._threads |= set(threading.enumerate())
        self._changed_modules()

    def leaks(self) -> tuple[str, ...]:
        """Return descriptions of the state that has changed since `begin`."""
        now = _process_state()
        leaks = []
        for name in sorted(now.keys() | self._state.keys()):
            value = now.get(name)
            if value != self._state.get(name) and value not in self._allowed.get(name, ()):
                leaks.append(f"{name}: {_change(self._state.get(name), value)}")
        threads = {thread.name for thread in threading.enumerate() if thread not in self._threads and _stays(thread)}
        if threads:
            leaks.append(f"threads: {', '.join(sorted(threads))}")
        changed = self._changed_modules()
        if changed:
            leaks.append(f"changed: {', '.join(changed)}")
        return tuple(leaks)

    def _changed_modules(self) -> list[str]:
        """Return the names that were replaced in modules since the last call."""
        changed = []
        for name, module in list(sys.modules.items()):
            known = self._modules.get(name)
            if not isinstance(module, types.ModuleType):
                changed += [f"sys.modules[{name!r}]"] * (known is not None)
                self._modules.pop(name, None)
                continue
            if known is not None and _is_unchanged(module, known):
                continue
            if known is not None:
                first = self._first.setdefault(name, known)
                every = self._is_of_project(module)
                changed += [f"{name}.{variable}" for variable in _changed_names(module, known, first, every=every)]
            if not name.startswith(_NOT_WATCHED):
                # References to the values, so that no new object gets the identity of an old one.
                self._modules[name] = dict(vars(module))
        return changed

    def _is_of_project(self, module: types.ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and file.startswith(self._project) and "site-packages" not in file


def _is_unchanged(module: types.ModuleType, known: Mapping[str, object]) -> bool:
    """Return whether every name of a module has the same object as before. All 80,000 names take 8 ms."""
    now = vars(module)
    return len(now) == len(known) and all(map(operator.is_, now.values(), known.values()))


def _changed_names(
    module: types.ModuleType, known: Mapping[str, object], first: Mapping[str, object], *, every: bool
) -> list[str]:
    """Return the names whose object is neither the last one nor the first.

    Args:
        module: The module.
        known: Its contents when they were last compared.
        first: Its contents before their first change.
        every: Whether all names are compared, or those of functions and classes.
    """
    now = vars(module)
    missing = object()
    return [
        name
        for name, value in known.items()
        if not any(now.get(name, missing) is earlier for earlier in (value, first.get(name, value)))
        and (every or (isinstance(value, _CODE) and not _is_own(module, now.get(name))))
        and not name.startswith(("__", "@"))
        and (module.__name__, name) not in _SET_BY_TORCH
    ]


def _is_own(module: types.ModuleType, value: object) -> bool:
    """Return whether a package has replaced its own code by its own, as torch does when it loads its compiler."""
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] == module.__name__.partition(".")[0]


def _process_state() -> dict[str, object]:
    variables = {
        f"environment: {name}": value
        for name, value in os.environ.items()
        if not name.startswith(_VARIABLES_NOT_WATCHED)
    }
    handlers = {f"handler of signal {number}": signal.getsignal(number) for number in _WATCHED_SIGNALS}
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
    """Return whether a thread is still running after a short wait."""
    if thread.name == BOARD_THREAD:  # of the session, which tests share: it begins with the first slow call
        return False
    thread.join(THREAD_EXIT_SECONDS)
    return thread.is_alive()


def _children() -> set[int]:
    """Return the ids of this process's children, where the kernel lists them."""
    children: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            children.update(map(int, task.read_text().split()))
    return children


def _change(before: Any, after: Any) -> str:  # noqa: ANN401 - values of several types
    if isinstance(before, set) and isinstance(after, set):
        return ", ".join(str(value) for value in sorted(after ^ before))
    return f"{before!r:.60} became {after!r:.60}"
