"""The files of imported modules: whether any of them has changed since."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from rankwise._launch.preload import INSTALLED

_State: TypeAlias = tuple[int, int, int] | None


class ImportedFiles:
    """The files of all modules that are imported now, and the folders of installed packages.

    A package that is installed later may be one that an imported module has looked for in vain.
    """

    def __init__(self) -> None:
        self._states = {path: _state(path) for path in {*_files(), *_package_folders()}}

    def changed(self) -> str:
        """Return one that has changed; "" if none has."""
        return next((path for path, state in self._states.items() if _state(path) != state), "")


def _files() -> Iterator[str]:
    yield sys.executable
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.has_location and spec.origin:
            yield spec.origin


def _package_folders() -> Iterator[str]:
    yield from (entry for entry in sys.path if Path(entry).name in INSTALLED)


def _state(path: str) -> _State:
    try:
        status = os.stat(path)  # noqa: PTH116 - thousands of them
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
