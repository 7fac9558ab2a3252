"""The target of ranks, a script, module or program: checked once, before any process is started."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Final

from rankwise._launch.forkserver.ipc import TargetKind
from rankwise._launch.interpreter import working_directory
from rankwise._launch.standard_streams import STANDARD_INPUT
from rankwise.errors import InvalidArgumentError

_PYTHON: Final = re.compile(r"python[0-9.]*")


class NotExecutableError(InvalidArgumentError):
    """The program exists, but cannot be executed."""


def check_target(kind: TargetKind, target: str) -> None:
    """Check that the target exists.

    Args:
        kind: SCRIPT, MODULE or PROGRAM.
        target: The path or name of the target.

    Raises:
        LaunchError: The working directory was deleted.
        InvalidArgumentError: There is no such script, module or program.
        NotExecutableError: The program exists, but cannot be executed.
    """
    checks = {
        TargetKind.SCRIPT: _check_script,
        TargetKind.MODULE: _check_module,
        TargetKind.PROGRAM: _check_program,
    }
    checks[kind](target, working_directory())


def is_piped(script: str) -> bool:
    """Return whether a script can be read once only: standard input, or a named pipe as of `<(...)` in a shell."""
    path = Path(script)
    return script == STANDARD_INPUT or (path.exists() and not path.is_file() and not path.is_dir())


def read_piped(script: str) -> bytes | None:
    """Return the source of a script that can be read once only; None for others.

    Raises:
        InvalidArgumentError: It cannot be read.
    """
    if not is_piped(script):
        return None
    try:
        with io.FileIO(0 if script == STANDARD_INPUT else script, closefd=script != STANDARD_INPUT) as file:
            return file.readall()
    except OSError as error:
        raise InvalidArgumentError(f"script {script!r} cannot be read: {error.strerror}") from error


def _check_script(script: str, here: str) -> None:
    if script == STANDARD_INPUT:
        return
    path = Path(script)
    if not path.exists():
        hint = (
            ": leave it out, rankwise starts Python itself; --no-python starts another program"
            if _PYTHON.fullmatch(path.name)
            else ""
        )
        raise InvalidArgumentError(f"script {script!r} does not exist (looked in {here}){hint}")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise InvalidArgumentError(f"script {script!r} is a directory, and has no __main__.py")


def _check_program(program: str, here: str) -> None:
    if shutil.which(program) is not None:
        return
    path = Path(program)
    if path.is_dir():
        raise NotExecutableError(f"program {program!r} is a directory")
    if not path.is_file():
        raise InvalidArgumentError(f"program {program!r} is not found (looked in {here} and in PATH)")
    if os.sep not in program:
        raise InvalidArgumentError(f"program {program!r} is not found in PATH; did you mean ./{program}?")
    python = "; a Python script runs without --no-python" if path.suffix == ".py" else ""
    raise NotExecutableError(f"program {program!r} cannot be executed (permission denied): chmod +x {program}{python}")


def _check_module(name: str, here: str) -> None:
    """Check a module without importing its packages, which would run their code in the launcher."""
    first, *rest = name.split(".")
    spec = find_top_level(first, here)
    for part in rest:
        if spec is not None and _may_change_search_path(spec):
            return
        spec = _inside(spec, part)
    if spec is None:
        hint = f"; did you mean -m {name[:-3]}?" if name.endswith(".py") else ""
        raise InvalidArgumentError(f"module {name!r} is not found (looked in {here} and sys.path){hint}")
    is_package = spec.submodule_search_locations is not None and not _may_change_search_path(spec)
    if is_package and _inside(spec, "__main__") is None:
        raise InvalidArgumentError(f"module {name!r} is a package, and has no __main__.py")


def find_top_level(name: str, here: str) -> ModuleSpec | None:
    """Find a top-level module for a program that looks in a folder first, without importing it."""
    path = sys.path if sys.flags.safe_path else [here, *sys.path]
    try:
        return PathFinder.find_spec(name, path) or importlib.util.find_spec(name)
    except ValueError:  # it has no name, or was imported without a spec
        return None


def find_main(name: str, here: str) -> str | None:
    """Return the file that runs as a module; None if it has none, or a package decides when it is imported."""
    first, *rest = name.split(".")
    spec = find_top_level(first, here)
    for part in rest:
        spec = _inside(spec, part)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _inside(spec, "__main__")
    return None if spec is None else spec.origin


def _inside(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    # By the last part of its name: for the whole name, a package without __init__.py would have to be imported.
    return None if package is None else PathFinder.find_spec(name, list(package.submodule_search_locations or ()))


def _may_change_search_path(package: ModuleSpec) -> bool:
    """Return whether a package may change its search path when it is imported."""
    source = Path(package.origin or "")
    return source.name == "__init__.py" and b"__path__" in source.read_bytes()
