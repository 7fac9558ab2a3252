"""Collecting tests in a rank: a file is collected, and imported, when the first of its tests is to run.

All files are parts of one collection of pytest, so that fixtures of wider scope are shared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from rankwise.testing._plugin.messages import ItemId


def name_in_file(item: pytest.Item) -> str:
    """Return a test's name in its file. The path in its node id is relative to a folder that differs between runs."""
    return item.nodeid.partition("::")[2]


class LazyCollection:
    """The hooks that collect one file at a time."""

    def __init__(self, config: pytest.Config, on_import: Callable[[], None]) -> None:
        """Begin with an empty collection.

        Args:
            config: The configuration of the session.
            on_import: Called when a file was imported, so that changes by imports are not attributed to a test.
        """
        self._config = config
        self._on_import = on_import
        self._items: dict[str, dict[str, pytest.Item]] = {}
        self._directories: dict[Path, pytest.Collector | None] = {}
        self._is_collecting = False
        self._problem = ""
        self._problems: dict[str, str] = {}

    def find(self, session: pytest.Session, item_id: ItemId) -> pytest.Item | None:
        """Return a test, or None if it does not exist: see `problem`."""
        if item_id.path not in self._items:
            self._collect(session, item_id.path)
        return self._items[item_id.path].get(item_id.name)

    def problem(self, item_id: ItemId) -> str:
        """Return why a test was not found."""
        missing = f"{item_id.name} does not exist on this rank; do names of tests differ between processes?"
        return self._problems[item_id.path] or missing

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool | None:
        return None if self._is_collecting else True  # True skips pytest's collection of its arguments

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None]:
        # pytest (9.1 and later) drops here the conftest.py files of its arguments in folders that were not collected.
        # In a rank these folders may be collected later.
        pending = getattr(session._fixturemanager, "_pending_conftests", {})  # noqa: SLF001 - it has no public name
        kept = dict(pending)
        yield
        pending.update(kept)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collect_directory(self, path: Path) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        # One collector for all files in a directory, though they are collected separately: fixtures of conftest.py
        # belong to the collector.
        return self._directories.setdefault(path, (yield))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        found = list(items)  # all, since pytest's own process has selected the tests already
        yield
        items[:] = found

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._problem = f"{report.nodeid} was not collected on this rank:\n{report.longreprtext}"

    def _collect(self, session: pytest.Session, path: str) -> None:
        self._problem = ""
        self._is_collecting = True
        # Relative, since pytest takes brackets in a path for parameters.
        self._config.args = [os.path.relpath(path, self._config.invocation_params.dir)]
        try:
            # The hook, and not `perform_collect`: other hooks around it prepare the collection, such as the
            # rewriting of asserts.
            self._config.hook.pytest_collection(session=session)
        except pytest.UsageError as error:
            self._problem = str(error)
        finally:
            self._is_collecting = False
        self._items[path] = {name_in_file(item): item for item in session.items}
        self._problems[path] = self._problem
        self._on_import()
