"""The modules that ranks inherit from the fork server: what a user has named, and the imports of a script."""

from __future__ import annotations

import ast
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final, TypeAlias

from rankwise._launch.forkserver.ipc import TargetKind
from rankwise._launch.interpreter import working_directory
from rankwise._launch.targets import find_main, find_top_level, is_piped
from rankwise.errors import InvalidArgumentError, shown

# The argument of users; True for the modules of the variable, False for ranks that are new interpreters.
Preload: TypeAlias = bool | str | Sequence[str]

_VARIABLE: Final = "RANKWISE_PRELOAD"
_AUTO: Final = "auto"
# The folders that installed packages are in; those of the user's own work are elsewhere.
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MainSource:
    """The program of ranks.

    Attributes:
        code: Its source; b"" if it has none.
        folder: The first folder in which it looks for modules.
    """

    code: bytes
    folder: str


def check_preload(preload: object) -> None:
    """Check the argument of a user.

    Raises:
        InvalidArgumentError: It is none of a bool, names of modules in one string, and a sequence of names.
    """
    if not isinstance(preload, bool):
        _names(preload, f"preload={shown(preload)}")


def preloaded_modules(preload: Preload, environ: Mapping[str, str], main: MainSource) -> tuple[str, ...] | None:
    """Return the modules that the fork server has to import; None if each rank is a new interpreter.

    Args:
        preload: The argument of the user; with True, the variable RANKWISE_PRELOAD has the names.
        environ: The environment.
        main: The program of ranks.

    Raises:
        InvalidArgumentError: A module does not exist, or belongs to the program itself.
    """
    if preload is False:
        return None
    value, source = (environ.get(_VARIABLE, ""), _VARIABLE) if preload is True else (preload, "preload")
    found: list[str] = []
    for name in _names(value, f"{source}={shown(value)}"):
        if name == _AUTO:
            found += _installed_imports(main)
        else:
            _check_module(name, source, main)
            found.append(name)
    return tuple(dict.fromkeys(found))


def script_source(kind: TargetKind, target: str) -> MainSource:
    """Return the program of a SCRIPT or MODULE, which exists."""
    if kind is TargetKind.MODULE:
        return MainSource(code=_read(find_main(target, working_directory())), folder=working_directory())
    if is_piped(target):
        return MainSource(code=b"", folder=working_directory())  # its imports are not known before it is read
    path = Path(target)
    if path.is_dir():
        return MainSource(code=_read(str(path / "__main__.py")), folder=os.path.abspath(target))  # noqa: PTH100
    if zipfile.is_zipfile(target):
        with zipfile.ZipFile(target) as archive:
            return MainSource(code=archive.read("__main__.py"), folder=os.path.abspath(target))  # noqa: PTH100
    return MainSource(code=_read(target), folder=str(path.resolve().parent))


def caller_source() -> MainSource:
    """Return the program that this process runs."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return MainSource(code=b"", folder=working_directory())
    return MainSource(code=_read(file), folder=str(Path(file).resolve().parent))


def _read(file: str | None) -> bytes:
    path = Path(file or "")
    return path.read_bytes() if path.is_file() else b""


def _names(value: object, shown_value: str) -> list[str]:
    """Return the names in a value.

    Raises:
        InvalidArgumentError: It has none.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or isinstance(names, bytes):
        raise InvalidArgumentError(f"{shown_value} is neither a bool nor names of modules")
    for name in names:
        parts = name.strip().replace(":", ".", 1).split(".") if isinstance(name, str) else [""]
        if name != "" and not all(part.isidentifier() for part in parts):
            raise InvalidArgumentError(
                f"{shown_value}: {shown(name)} is not the name of a module (that of scikit-learn is sklearn)"
            )
    return [name.strip() for name in names if name]


def _check_module(name: str, source: str, main: MainSource) -> None:
    top = name.partition(":")[0].partition(".")[0]
    spec = find_top_level(top, main.folder)
    if spec is None:
        raise InvalidArgumentError(
            f"{source} names the module {name!r}, but {top!r} is not installed for {sys.executable}: install it, or "
            "leave it out"
        )
    if os.path.realpath(main.folder) in map(os.path.realpath, _search_folders(spec)):
        raise InvalidArgumentError(
            f"{source} names the module {name!r}, but {top!r} is in the program's own folder, {main.folder}, and only "
            "modules from elsewhere are preloaded: leave it out"
        )


def _installed_imports(main: MainSource) -> Iterator[str]:
    """Yield the installed modules that a program imports at its top level, without conditions."""
    try:
        body = ast.parse(main.code).body
    except (SyntaxError, ValueError):
        return  # the rank shows it
    for statement in body:
        for name in _imports(statement):
            spec = find_top_level(name.partition(":")[0].partition(".")[0], main.folder)
            folders = _search_folders(spec)
            if folders and all(Path(folder).name in _INSTALLED for folder in folders):
                yield name


def _imports(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
        for alias in statement.names:
            yield statement.module if alias.name == "*" else f"{statement.module}:{alias.name}"


def _search_folders(spec: ModuleSpec | None) -> list[str]:
    """Return the entries of the search path that a top-level module was found in; [] if it is built in."""
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [os.path.dirname(location) for location in spec.submodule_search_locations]  # noqa: PTH120
    return [os.path.dirname(spec.origin)] if spec.has_location and spec.origin else []  # noqa: PTH120
