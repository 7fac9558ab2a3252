"""Starting this interpreter once more: with the options that it was started with, and finding what was found here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from rankwise.errors import LaunchError

# The first entry of the search path is the working directory, which no script asked for. Where the caller has found
# what is needed, if a new interpreter would not look there, comes after the standard library; the rest comes last.
_BOOTSTRAP: Final = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); own = sys.path[:]; "
    "at = next((at for at, entry in enumerate(own) if entry.endswith('-packages')), len(own)); "
    "sys.path[at:at] = [entry for entry in {homes!r} if entry not in own]; "
    "sys.path += [entry for entry in {others!r} if entry not in sys.path]; "
    "from rankwise._launch.{module} import main; main(own)"
)
# Ranks write the command that they run over this one.
_ROOM_FOR_TITLE: Final = 2048
# What the processes of a launcher cannot do without.
_NEEDED: Final = ("rankwise", "torch", "cloudpickle")
# Of `subprocess`, whose list lacks these.
_FORGOTTEN: Final = (
    "int_max_str_digits",
    "no_debug_ranges",
    "pycache_prefix",
    "warn_default_encoding",
    "cpu_count",
    "gil",
)


def command(module: str) -> list[str]:
    """Return the command of an interpreter that calls `main` of a module of `rankwise._launch`; arguments may follow.

    It has this one's search path.

    Raises:
        LaunchError: There is no interpreter to start.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise LaunchError(
            f"ranks are started with Python's interpreter, but this program has none of its own "
            f"(sys.executable is {sys.executable!r}): run it with python, or let another launcher start its ranks"
        )
    code = _BOOTSTRAP.format(homes=list(dict.fromkeys(_homes())), others=list(search_path()), module=module)
    return [sys.executable, *options(), "-c", code.ljust(_ROOM_FOR_TITLE)]


def search_path() -> tuple[str, ...]:
    """Return where this process finds its modules, in absolute terms: "" is the working directory."""
    here = working_directory()
    return tuple(os.path.join(here, entry) if entry else here for entry in map(os.fspath, sys.path))  # noqa: PTH118


def working_directory() -> str:
    """Return the working directory.

    Raises:
        LaunchError: It was deleted.
    """
    try:
        return os.getcwd()  # noqa: PTH109 - the search path is made of strings
    except FileNotFoundError as error:
        raise LaunchError(
            "the working directory was deleted, and ranks that start in it cannot load torch; cd to one that exists"
        ) from error


def options() -> list[str]:
    """Return the options that this interpreter was started with."""
    found: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    for name in _FORGOTTEN:
        value = sys._xoptions.get(name)  # noqa: SLF001 - documented
        if value is not None:
            found += ["-X", name if value is True else f"{name}={value}"]
    return found


def _homes() -> Iterator[str]:
    """Give the folders in which the needed packages are."""
    for name in _NEEDED:
        module = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if module is None else getattr(module, "__spec__", None)
        if spec is not None and spec.origin:
            yield os.path.dirname(os.path.dirname(os.path.abspath(spec.origin)))  # noqa: PTH100, PTH120
