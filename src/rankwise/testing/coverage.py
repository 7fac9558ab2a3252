"""Coverage of code that only ranks run: each writes a file of its own, which the run combines with those of workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_OPTIONS: Final = (
    "run:branch",
    "run:source",
    "run:source_pkgs",
    "run:omit",
    "run:include",
    "run:plugins",
    "run:relative_files",
    "run:data_file",
)


def settings() -> dict[str, Any]:
    """Return what of the coverage this process measures, {} if it does not."""
    module = sys.modules.get("coverage")
    current = None if module is None else module.Coverage.current()
    if current is None:
        return {}
    found = {name: current.get_option(name) for name in _OPTIONS}
    found["run:data_file"] = str(Path(found["run:data_file"]).absolute())
    return found


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
