"""Plugins that keep what tests have shown in files, as syrupy does: what ranks add, and what is not unused."""

from __future__ import annotations

import fcntl
import os
from typing import Final

import pytest

# Of syrupy: do not look for snapshots that no test has asked for.
DISABLE_UNUSED: Final = "disable_unused_snapshots"
_FIXTURE: Final = "snapshot"
# Where a worker of pytest-xdist tells its controller, which has no tests of its own.
_OUTPUT: Final = "rankwise_snapshots"
_NOTE: Final = (
    "tests in ranks have snapshots, which are not counted here; so snapshots that are not used were not looked for"
)


class SessionFinishLock:
    """Lets plugins that write first thing at the end of a session do so one rank after the other.

    They read a file, and write it with what they add. Fixtures end later, on all ranks at the same time.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = -1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def register(self, manager: pytest.PytestPluginManager) -> None:
        """Come before plugins that write first thing, and after them."""
        manager.register(_Unlock(self))
        manager.register(self)

    def let_go(self) -> None:
        """Let the next rank write."""
        os.close(self._file)


class _Unlock:
    """The hook that comes after those that come first."""

    def __init__(self, turn: SessionFinishLock) -> None:
        self._turn = turn

    def pytest_sessionfinish(self) -> None:
        self._turn.let_go()


def keep_snapshots_of_ranks(config: pytest.Config, items: list[pytest.Item]) -> str:
    """Keep the snapshots of tests in ranks from being taken for unused; return what to show of that, "" if nothing.

    Args:
        config: Of pytest's own process, where such tests do not ask for their snapshots.
        items: The tests that run in ranks.
    """
    has_snapshots = any(_FIXTURE in getattr(item, "fixturenames", ()) for item in items)
    if not has_snapshots or getattr(config.option, DISABLE_UNUSED, True):
        return ""
    setattr(config.option, DISABLE_UNUSED, True)
    getattr(config, "workeroutput", {})[_OUTPUT] = True
    return _NOTE


def keep_snapshots_of_worker(config: pytest.Config, worker: object) -> str:
    """Do the same in the controller of pytest-xdist, when a worker has ended; return what to show of that."""
    if not (getattr(worker, "workeroutput", None) or {}).get(_OUTPUT):
        return ""
    setattr(config.option, DISABLE_UNUSED, True)
    return _NOTE
