"""Coverage of code that only ranks run: each writes a file of its own, which is combined with the run's in the end.

Where the run is measured in parallel, as by pytest-cov or `coverage run -p`, whoever combines its files combines these
as well. Where it is not, nobody would, so it is done here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    "run:data_file",
)
_FOLDER: Final = "coverage"


def settings(base: Path) -> dict[str, Any]:
    """Return what of the coverage this process measures, {} if it does not.

    Args:
        base: A folder of this run, for what `take_in` takes.
    """
    current = _current()
    if current is None:
        return {}
    found = {name: current.get_option(name) for name in _OPTIONS}
    if current.get_option("run:parallel"):
        found["run:data_file"] = str(Path(found["run:data_file"]).absolute())
    else:
        (base / _FOLDER).mkdir(exist_ok=True)
        found["run:data_file"] = str(base / _FOLDER / "ranks")
    return found


def take_in(base: Path) -> None:
    """Add what ranks have measured to what this process measures, if nobody else does."""
    current = _current()
    files = list((base / _FOLDER).glob("ranks.*"))
    if current is None or not files:
        return
    from coverage import CoverageData  # noqa: PLC0415 - only where the run has it

    for file in files:
        data = CoverageData(basename=str(file))
        data.read()
        current.get_data().update(data)
        data.close()
        file.unlink()


@contextmanager
def measured(found: Mapping[str, Any]) -> Iterator[None]:
    """Measure the block as `settings` says."""
    if not found:
        yield
        return
    import coverage  # noqa: PLC0415 - only where the run has it

    measuring = coverage.Coverage(data_file=found["run:data_file"], data_suffix=True, config_file=False)
    for name, value in found.items():
        if name != "run:data_file" and value is not None:
            measuring.set_option(name, value)
    measuring.start()
    try:
        yield
    finally:
        measuring.stop()
        measuring.save()


class Contexts:
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
