"""The command for another interpreter like this one: with the same options, and the same search path."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from rankwise.errors import LaunchError

# With -c the first entry of the search path is the working directory, which a script would not have: it is removed. The
# folders in which the caller has found the needed packages, if a new interpreter does not search them, come after the
# standard library; the rest of the caller's search path comes last.
_BOOTSTRAP: Final = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); own = sys.path[:]; "
    "at = next((at for at, entry in enumerate(own) if entry.endswith('-packages')), len(own)); "
    "sys.path[at:at] = [entry for entry in {homes!r} if entry not in own]; "
    "sys.path += [entry for entry in {others!r} if entry not in sys.path]; "
    "from rankwise._launch.{module} import main; main(own)"
)
# Ranks overwrite this command with their own, as the title of the process: it has to be long enough.
_TITLE_BYTES: Final = 2048
# The packages that the processes of a launcher need.
_NEEDED: Final = ("rankwise", "torch", "cloudpickle")
# Options of the interpreter that the list of `subprocess` lacks.
_OTHER_OPTIONS: Final = (
    "int_max_str_digits",
    "no_debug_ranges",
    "pycache_prefix",
    "warn_default_encoding",
    "cpu_count",
    "gil",
)


def interpreter_command(module: str) -> list[str]:
    """Return a command that calls `main` of a module of `rankwise._launch`; arguments may be appended.

    The new interpreter has this one's search path.

    Raises:
        LaunchError: There is no interpreter to start.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise LaunchError(
            f"ranks are started with Python's interpreter, but this program has none of its own "
            f"(sys.executable is {sys.executable!r}): run it with python, or let another launcher start its ranks"
        )
    code = _BOOTSTRAP.format(homes=list(dict.fromkeys(_package_folders())), others=list(search_path()), module=module)
    return [sys.executable, *interpreter_options(), "-c", code.ljust(_TITLE_BYTES)]


def search_path() -> tuple[str, ...]:
    """Return `sys.path` of this process with absolute paths: "" stands for the working directory."""
    here = working_directory()
    return tuple(os.path.join(here, entry) if entry else here for entry in map(os.fspath, sys.path))  # noqa: PTH118


def working_directory() -> str:
    """Return the working directory.

    Raises:
        LaunchError: The directory was deleted.
    """
    try:
        return os.getcwd()  # noqa: PTH109 - the search path is made of strings
    except FileNotFoundError as error:
        raise LaunchError(
            "the working directory was deleted, and ranks that start in it cannot load torch; cd to one that exists"
        ) from error


def interpreter_options() -> list[str]:
    """Return the command-line options of this interpreter."""
    found: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    for name in _OTHER_OPTIONS:
        value = sys._xoptions.get(name)  # noqa: SLF001 - documented
        if value is not None:
            found += ["-X", name if value is True else f"{name}={value}"]
    return found


def _package_folders() -> Iterator[str]:
    """Yield the folders that contain the needed packages."""
    for name in _NEEDED:
        module = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if module is None else getattr(module, "__spec__", None)
        if spec is not None and spec.origin:
            yield os.path.dirname(os.path.dirname(os.path.abspath(spec.origin)))  # noqa: PTH100, PTH120
