"""Plugins that keep snapshots in files, as syrupy does: ranks write one after the other, and use some snapshots."""

from __future__ import annotations

import os
from typing import Final

import pytest

# The option of syrupy that disables the search for snapshots that no test has used.
DISABLE_UNUSED: Final = "disable_unused_snapshots"
_FIXTURE: Final = "snapshot"
# The key of `workeroutput` by which a worker of pytest-xdist informs its controller, which has no tests of its own.
_WORKER_OUTPUT: Final = "rankwise_snapshots"
_NOTE: Final = (
    "tests in ranks have snapshots, which are not counted here; so snapshots that are not used were not looked for"
)


class SessionFinishLock:
    """A lock that a rank holds while plugins write files at the end of the session.

    The plugins read a file, add snapshots and write it. They do so in the first hooks of `pytest_sessionfinish`; later
    hooks tear down fixtures, on all ranks at the same time, and run without the lock.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = -1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        import fcntl  # noqa: PLC0415 - not on Windows, where no test runs in ranks

        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def register(self, manager: pytest.PytestPluginManager) -> None:
        """Register the hooks that acquire the lock, and release it: as first of the first ones, and behind them."""
        manager.register(_Unlock(self))
        manager.register(self)

    def release(self) -> None:
        """Release the lock, for the next rank."""
        os.close(self._file)


class _Unlock:
    """The hook that releases the lock: it runs after all hooks with `tryfirst`."""

    def __init__(self, lock: SessionFinishLock) -> None:
        self._lock = lock

    def pytest_sessionfinish(self) -> None:
        self._lock.release()


def keep_snapshots_of_ranks(config: pytest.Config, items: list[pytest.Item]) -> str:
    """Prevent that snapshots of tests in ranks are taken for unused.

    Args:
        config: The configuration of pytest's own process, in which such tests do not use their snapshots.
        items: The tests that run in ranks.

    Returns:
        A note for the summary of the run; "" if nothing was changed.
    """
    has_snapshots = any(_FIXTURE in getattr(item, "fixturenames", ()) for item in items)
    if not has_snapshots or getattr(config.option, DISABLE_UNUSED, True):
        return ""
    setattr(config.option, DISABLE_UNUSED, True)
    getattr(config, "workeroutput", {})[_WORKER_OUTPUT] = True
    return _NOTE


def keep_snapshots_of_worker(config: pytest.Config, worker: object) -> str:
    """Do the same in the controller of pytest-xdist, when a worker has ended, and return the note."""
    if not (getattr(worker, "workeroutput", None) or {}).get(_WORKER_OUTPUT):
        return ""
    setattr(config.option, DISABLE_UNUSED, True)
    return _NOTE
