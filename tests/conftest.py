"""The leak police: a test leaves this process as it found it. There is no allow-list."""

from __future__ import annotations

import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.nn.functional  # which makes a temporary folder in torch 2.9

from rankwise._comm.control.board import BOARD_THREAD
from rankwise._comm.group import Group
from rankwise._session.current import opened_session, reset_current
from rankwise._session.session import Session, state_behind

pytest_plugins = ["pytester", "tests.lanes"]

torch.set_num_threads(1)

# Tests start some hundred interpreters. Where images of machines forbid to keep compiled code, each compiles all of it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# With it, print() writes each of its values, and the newline, apart: a rank that is ended between them leaves half a
# line, and two ranks that share a stream mix theirs. Images of machines often set it.
os.environ.pop("PYTHONUNBUFFERED", None)

# Torch's stores ask the name server for every address that connects, and where an answer is lost wait 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A folder for temporary files of this run alone, so that what is left in it was left by a test. Each worker of
# pytest-xdist has its own, which its ranks share.
if "RANKWISE_TESTS_TEMPORARY" not in os.environ:
    os.environ["RANKWISE_TESTS_TEMPORARY"] = tempfile.mkdtemp(prefix="tests-")
    # After multiprocessing has removed its own.
    multiprocessing.util.Finalize(
        None, shutil.rmtree, args=(os.environ["RANKWISE_TESTS_TEMPORARY"], True), exitpriority=-200
    )
TEMPORARY = Path(os.environ["RANKWISE_TESTS_TEMPORARY"], os.environ.get("PYTEST_XDIST_WORKER", "main"))
TEMPORARY.mkdir(exist_ok=True)
os.environ["TMPDIR"] = tempfile.tempdir = str(TEMPORARY)

# The folders of pytest and of the fork server that ranks come from, and the file by which a process finds out that it
# may write there, gone in a moment: eight characters alone, to which the names of all other files add something.
HARNESS = re.compile(r"pytest-of-.*|pymp-.*|[a-z0-9_]{8}")

# A run ignores SIGINT and SIGQUIT in the background of a shell, SIGHUP under nohup, and so do the programs that it
# starts; but tests send these signals. SIGHUP stays without effect here: programs start with the default of a signal
# that has a handler.
for _signal, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, lambda *_: None),
):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, _handler)

# What launchers set: a test run started by one of them must not take itself for a rank.
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID"):
    os.environ.pop(_name, None)


@pytest.fixture
def comm(world: Session) -> Group:
    """The group of all ranks of the world that a test runs in."""
    return Group(state_behind(world).comm)


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """Check that the threads of non-blocking calls end."""
    yield
    assert not _threads_of_groups_that_stay()


def _threads_of_groups_that_stay() -> list[str]:
    """Return the threads of non-blocking calls that do not end; each ends a moment after its last work."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("rankwise: a group")]
    for thread in threads:
        thread.join(200)
    return [thread.name for thread in threads if thread.is_alive()]


@pytest.fixture
def torch_random() -> Iterator[None]:
    """Give torch's random state back afterwards, for bodies that build models."""
    with torch.random.fork_rng():
        yield


def _state() -> dict[str, object]:
    helpers = {"multiprocessing.forkserver", "multiprocessing.resource_tracker"}
    children = {pid for pid in _children() if not any(helper in " ".join(_command(pid)) for helper in helpers)}
    return {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "working directory": Path.cwd(),
        "process group": torch.distributed.is_initialized(),
        "session": opened_session(),
        "children": children,
        # Not those of torch's engine for gradients, which stay, and appear when one of them first runs Python; nor that
        # of a session that tests share, which begins with its first slow call.
        "threads": {
            thread.name
            for thread in threading.enumerate()
            if not isinstance(thread, threading._DummyThread) and thread.name != BOARD_THREAD
        },
        # SIGALRM is the timeout plugin's.
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}},
        "except hook": sys.excepthook,
        "random state": torch.random.get_rng_state().numpy().tobytes(),
        "temporary files": {path.name for path in TEMPORARY.iterdir() if not HARNESS.fullmatch(path.name)},
    }


def _children() -> set[int]:
    """Return the children of all threads: psutil reads all processes of the machine for it, twice in each test."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():  # a kernel without these files
        return {process.pid for process in psutil.Process().children()}
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            children.update(map(int, (task / "children").read_text().split()))
    return children


def _command(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    """Fail a test that leaves something behind."""
    reset_current()
    before = _state()
    yield
    reset_current()
    _threads_of_groups_that_stay()  # so that `after` has only those that do
    after = _state()
    leaked = [_difference(name, before[name], after[name]) for name in before if before[name] != after[name]]
    if leaked:
        pytest.fail("the test left something behind:\n" + "\n".join(leaked), pytrace=False)


def _difference(name: str, before: object, after: object) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        return f"{name}: " + ", ".join(f"{key}: {before.get(key)!r} became {after.get(key)!r}" for key in changed)
    if isinstance(before, set) and isinstance(after, set):
        return f"{name}: {sorted(before - after)} went, {sorted(after - before)} came"
    return f"{name}: {before!r:.100} became {after!r:.100}"
