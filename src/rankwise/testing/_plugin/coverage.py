"""Coverage of code that only ranks run: each writes a file of its own, which is added to the run's data in the end.

The files are combined here, also where the run is measured in parallel and its files are combined later: a rank that
was killed while it wrote leaves a broken file, which would end the run there.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

_OPTIONS: Final = (
    "run:branch",
    "run:source",
    "run:source_pkgs",
    "run:omit",
    "run:include",
    "run:plugins",
    "run:relative_files",
    "run:context",
    "run:dynamic_context",
)
_DATA_FILE: Final = "run:data_file"
_FOLDER: Final = "coverage"


def settings(base: Path) -> dict[str, Any]:
    """Return what of the coverage this process measures, {} if it does not.

    Args:
        base: A folder of this run, for what `combine` takes.
    """
    current = _current()
    if current is None:
        return {}
    found = {name: current.get_option(name) for name in _OPTIONS}
    (base / _FOLDER).mkdir(exist_ok=True)
    return found | {_DATA_FILE: str(base / _FOLDER / "ranks")}


def combine(base: Path) -> None:
    """Add what ranks have measured to what this process measures, but for files that are broken."""
    current = _current()
    files = list((base / _FOLDER).glob("ranks.*"))
    if current is None or not files:
        return
    from coverage import CoverageData, CoverageException  # noqa: PLC0415 - only where the run has it

    for file in files:
        data = CoverageData(basename=str(file))
        # Of a rank that was killed while it wrote. What reading a file finds broken, coverage raises, or sqlite.
        with contextlib.suppress(CoverageException, sqlite3.Error):
            data.read()
            current.get_data().update(data)
        data.close()
        file.unlink()


@contextlib.contextmanager
def measured(found: Mapping[str, Any]) -> Iterator[None]:
    """Measure the block as `settings` says."""
    if not found:
        yield
        return
    import coverage  # noqa: PLC0415 - only where the run has it

    measuring = coverage.Coverage(data_file=found[_DATA_FILE], data_suffix=True, config_file=False)
    for name, value in found.items():
        if name != _DATA_FILE and value is not None:
            measuring.set_option(name, value)
    measuring.start()
    try:
        yield
    finally:
        measuring.stop()
        measuring.save()


class CoverageContexts:
    """What `--cov-context=test` does: lines are noted with the test, and its phase, that ran them."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._switch(item, "setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._switch(item, "run")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._switch(item, "teardown")

    def _switch(self, item: pytest.Item, when: str) -> None:
        current = _current()
        if current is not None:
            current.switch_context(f"{item.nodeid}|{when}")


def _current() -> Any:  # noqa: ANN401 - of coverage, if the run has it
    """Return what measures this process; None if nothing does."""
    module = sys.modules.get("coverage")
    return None if module is None else module.Coverage.current()
