"""Coverage of code that only ranks run: each rank writes a file, which is added to the run's data at the end.

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
    """Return the coverage settings of this process, for its ranks; {} if it does not measure coverage.

    Args:
        base: A folder of this run, for the files that `combine` reads.
    """
    current = _current()
    if current is None:
        return {}
    options = {name: current.get_option(name) for name in _OPTIONS}
    (base / _FOLDER).mkdir(exist_ok=True)
    return options | {_DATA_FILE: str(base / _FOLDER / "ranks")}


def combine(base: Path) -> None:
    """Add the data of ranks to that of this process, but for files that are broken."""
    current = _current()
    files = list((base / _FOLDER).glob("ranks.*"))
    if current is None or not files:
        return
    from coverage import CoverageData, CoverageException  # noqa: PLC0415 - only where the run has it

    for file in files:
        data = CoverageData(basename=str(file))
        # The file of a rank that was killed while it wrote: coverage or sqlite raises when it is read.
        with contextlib.suppress(CoverageException, sqlite3.Error):
            data.read()
            current.get_data().update(data)
        data.close()
        file.unlink()


@contextlib.contextmanager
def measured(options: Mapping[str, Any]) -> Iterator[None]:
    """Measure the coverage of the block, with the result of `settings`."""
    if not options:
        yield
        return
    import coverage  # noqa: PLC0415 - only where the run has it

    measuring = coverage.Coverage(data_file=options[_DATA_FILE], data_suffix=True, config_file=False)
    for name, value in options.items():
        if name != _DATA_FILE and value is not None:
            measuring.set_option(name, value)
    measuring.start()
    try:
        yield
    finally:
        measuring.stop()
        measuring.save()


class CoverageContexts:
    """The contexts of `--cov-context=test` in ranks: each line is recorded with the test and phase that ran it."""

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
    """Return the object that measures this process, or None."""
    module = sys.modules.get("coverage")
    return None if module is None else module.Coverage.current()
