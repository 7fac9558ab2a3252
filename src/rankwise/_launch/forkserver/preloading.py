"""Modules that the fork server imports for its ranks: which of them ranks may inherit, and which each has to import.

A module may not be inherited if its import did what a fork does not copy, or what differs between ranks. When there is
such a module, the fork server executes itself again without it: nothing of the module is left in the process then.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from rankwise._backends import opened_accelerator
from rankwise._launch.forkserver.interpreter_exit import flush
from rankwise._launch.forkserver.ipc import ServerEvent
from rankwise._launch.reaper import (
    clear_parent_death_signal,
    kill_descendants,
    set_parent_death_signal,
    shared_memory_removers,
)
from rankwise.errors import summary

# The variables that differ between ranks, or that the fork server does not have.
RANK_VARIABLES: Final = frozenset({
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "RANKWISE_RUN_ID", "RANKWISE_OUTER_RANK"),
})  # fmt: skip
_PROCESS: Final = Path("/proc/self")
# The drivers of accelerators do not work in a fork of a process that has opened these.
_DEVICE_FILES: Final = tuple(
    f"/dev/{name}" for name in ("nvidia", "kfd", "dri/", "dxg", "accel", "davinci", "neuron", "hl")
)
# The library ends its threads before a fork and starts them again, in the parent and in the child.
_READY_FOR_FORK: Final = "openblas"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportEffects:
    """What the imports have set, which a rank has to have too.

    Attributes:
        environ: The environment variables.
        search_path: The entries that were added to `sys.path`.
    """

    environ: dict[str, str] = field(repr=False)
    search_path: tuple[str, ...]


def preload_modules(names: Sequence[str], report: Callable[[ServerEvent, str], None]) -> ImportEffects:
    """Import modules. Does not return, but starts the fork server again, if one of them may not be inherited.

    Args:
        names: The modules, each as "module", or "module:attribute" for one that is imported when it is first used.
        report: Called with IMPORTING and the name before each import, and with "" at the end; and with NOT_PRELOADED,
            the name and the reason.
    """
    environ, search_path = dict(os.environ), list(sys.path)
    refused = []
    if names:
        set_parent_death_signal()  # the fork server does not read its connection now
        _print_at_once()
    state = _ProcessState.now()
    for name in names:
        report(ServerEvent.IMPORTING, name)
        reason, state = _import(name, state)
        if reason:
            report(ServerEvent.NOT_PRELOADED, f"{name}\0{reason}")
            refused.append(name)
    if names:
        flush(report=False)
        ctypes.CDLL(None).fflush(None)  # else each rank would write it
        clear_parent_death_signal()
    if refused:
        # Starting again closes the files by which this process keeps those that remove shared memory from it.
        kill_descendants(left=shared_memory_removers())
        atexit._run_exitfuncs()  # noqa: SLF001 - the modules may have made files that are removed at exit
        left = ",".join(name for name in names if name not in refused)
        os.execve(sys.executable, [*sys.orig_argv[:-1], left], environ)  # noqa: S606 - this program
    report(ServerEvent.IMPORTING, "")
    return ImportEffects(
        environ={name: value for name, value in os.environ.items() if environ.get(name) != value},
        search_path=tuple(entry for entry in sys.path if entry not in search_path),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessState:
    """What a fork does not copy, or processes must not share. Global random generators get a new seed in each rank.

    Attributes:
        threads: The names of Python's threads, by their idents.
        native_threads: The number of other threads.
        libraries: The loaded libraries that are ready for a fork with threads.
        children: The child processes that run, and their descendants.
        sockets, devices: The open sockets; the open files of accelerators, and the accelerator that torch has opened.
    """

    threads: dict[int, str]
    native_threads: int
    libraries: frozenset[str]
    children: frozenset[int]
    sockets: frozenset[str]
    devices: frozenset[str]
    finalizers: frozenset[weakref.finalize[Any, Any]]

    @classmethod
    def now(cls) -> _ProcessState:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        # Those of the module `_thread` have no name.
        threads = {ident: names.get(ident, "of _thread") for ident in sys._current_frames()}  # noqa: SLF001 - documented
        files = frozenset(_open_files())
        return cls(
            threads=threads,
            native_threads=len(os.listdir(_PROCESS / "task")) - len(threads),  # noqa: PTH208 - only their number
            libraries=frozenset(_libraries(_READY_FOR_FORK)),
            children=frozenset(_running_children()),
            sockets=frozenset(file for file in files if file.startswith("socket:")),
            devices=frozenset(file for file in files if file.startswith(_DEVICE_FILES))
            | {str(opened) for opened in [opened_accelerator()] if opened is not None},
            finalizers=frozenset(_finalizers()),
        )

    def changes(self, after: _ProcessState) -> Iterator[str]:
        """Yield what has happened in this process since then, as the rest of a sentence."""
        if threads := [name for ident, name in after.threads.items() if ident not in self.threads]:
            yield f"started the thread {threads[0]!r}"
        if after.native_threads > self.native_threads and after.libraries == self.libraries:
            yield "started native threads"
        if after.children - self.children:
            yield "started a process"
        if after.devices - self.devices:
            yield "initialized an accelerator"
        if after.sockets - self.sockets:
            yield "opened a socket"
        if after.finalizers - self.finalizers:
            yield "keeps what is removed at exit"


def _import(name: str, before: _ProcessState) -> tuple[str, _ProcessState]:
    """Import a module, and return why it may not be inherited, "" if it may; and the state of the process after it."""
    module, _colon, attribute = name.partition(":")
    reasons = []
    with _observed_environ() as variables, _observed_exit_handlers() as handlers:
        try:
            __import__(module, fromlist=[attribute or "__name__"])
        except BaseException as error:  # noqa: BLE001 - SystemExit too; a rank that imports the module shows it
            reasons.append(f"raised {summary(error)}")
    after = _ProcessState.now()
    reasons += before.changes(after)
    if handlers:
        reasons.append("registered a function to run at exit")
    if variables:
        reasons.append(f"read {', '.join(sorted(variables))}")
    return " and ".join(reasons), after


@contextmanager
def _observed_environ() -> Iterator[set[str]]:
    """Collect the variables of ranks that are read from `os.environ`, by any of its methods.

    A copy of all variables, as for a child process, reads only those that the fork server has.
    """
    read: set[str] = set()
    original = type(os.environ)

    class Observed(original):  # type: ignore[valid-type, misc]  # the class has no public name
        def __getitem__(self, key: str) -> str:
            if key in RANK_VARIABLES:
                read.add(key)
            value: str = super().__getitem__(key)
            return value

    os.environ.__class__ = Observed  # modules may already have references to the object
    try:
        yield read
    finally:
        os.environ.__class__ = original


@contextmanager
def _observed_exit_handlers() -> Iterator[list[str]]:
    """Collect the modules that register functions to run at exit.

    In each rank such a function would do what should be done once, such as remove a folder that all use. Those of the
    standard library, of torch and of compiled code only end what belongs to a process, and are left out.
    """
    found: list[str] = []
    original = atexit.register

    def register(function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as of the original
        module = str(sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001 - as the interpreter's own modules do
        is_compiled = isinstance(function, types.BuiltinFunctionType) and function.__module__ is None
        if not is_compiled and module.partition(".")[0] not in {"torch", *sys.stdlib_module_names}:
            found.append(module)
        return original(function, *args, **kwargs)

    atexit.register = register  # type: ignore[assignment]  # of any function
    try:
        yield found
    finally:
        atexit.register = original


def _finalizers() -> Iterator[weakref.finalize[Any, Any]]:
    """Yield the finalizers that run at exit, such as those of temporary folders, but torch's."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
        found = finalizer.peek()
        if found is not None and finalizer.atexit and not str(found[1].__module__).startswith("torch."):
            yield finalizer


def _print_at_once() -> None:
    """Write each printed line at once: a module may keep the stream, which no rank flushes at its end."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it may be another object, or None


def _running_children() -> Iterator[int]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid


def _open_files() -> Iterator[str]:
    for descriptor in (_PROCESS / "fd").iterdir():
        with contextlib.suppress(OSError):  # that of the iteration is closed again
            yield os.readlink(descriptor)  # noqa: PTH115 - names such as "socket:[1]" are no paths


def _libraries(part: str) -> Iterator[str]:
    for line in (_PROCESS / "maps").read_text().splitlines():
        if part in line:
            yield line.split(maxsplit=5)[-1]
