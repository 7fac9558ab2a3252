"""Collecting tests in a rank: file by file as they come, all in one collection of pytest's.

A rank imports the files whose tests it runs, and no others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from rankwise.testing._plugin.messages import ItemId


def name_in_file(item: pytest.Item) -> str:
    """Return a test's name in its file; how pytest spells the file depends on where it was started."""
    return item.nodeid.partition("::")[2]


class LazyCollection:
    """The hooks that collect one file at a time."""

    def __init__(self, config: pytest.Config, settle: Callable[[], None]) -> None:
        """Begin with nothing collected.

        Args:
            config: Of the session.
            settle: Called when a file was imported: what modules do then is no test's doing.
        """
        self._config = config
        self._settle = settle
        self._items: dict[str, dict[str, pytest.Item]] = {}
        self._directories: dict[Path, pytest.Collector | None] = {}
        self._collects = False
        self._problem = ""
        self._problems: dict[str, str] = {}

    def find(self, session: pytest.Session, place: ItemId) -> pytest.Item | None:
        """Return a test, or None if it is not there: see `problem`."""
        if place.path not in self._items:
            self._collect(session, place.path)
        return self._items[place.path].get(place.name)

    def problem(self, place: ItemId) -> str:
        """Return why a test was not found."""
        missing = f"{place.name} does not exist on this rank; do names of tests differ between processes?"
        return self._problems[place.path] or missing

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool | None:
        return None if self._collects else True  # not what pytest was asked for, but files as they come

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None]:
        # pytest (9.1 and later) lets go here of those conftest.py files of its arguments whose folders it has not come
        # to. Here it may come to them yet.
        pending = getattr(session._fixturemanager, "_pending_conftests", {})  # noqa: SLF001 - there is no other way
        kept = dict(pending)
        yield
        pending.update(kept)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collect_directory(self, path: Path) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        # The same for all files in it, which are collected one by one: fixtures of conftest.py belong to it.
        return self._directories.setdefault(path, (yield))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        found = list(items)  # whatever is deselected now, pytest's own process has selected
        yield
        items[:] = found

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._problem = f"{report.nodeid} was not collected on this rank:\n{report.longreprtext}"

    def _collect(self, session: pytest.Session, path: str) -> None:
        self._problem = ""
        self._collects = True
        # Relative, for pytest takes brackets in a path for parameters.
        self._config.args = [os.path.relpath(path, self._config.invocation_params.dir)]
        try:
            # The hook, and not what it does in the end: the rest of pytest prepares for it, such as to rewrite asserts.
            self._config.hook.pytest_collection(session=session)
        except pytest.UsageError as error:
            self._problem = str(error)
        finally:
            self._collects = False
        self._items[path] = {name_in_file(item): item for item in session.items}
        self._problems[path] = self._problem
        self._settle()
