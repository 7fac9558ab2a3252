"""Records the text of every error of rankwise in this process. `tools.behaviour` lets each interpreter import it.

It is imported when an interpreter starts, so it imports nothing but what every interpreter has loaded already.
"""

from __future__ import annotations

import importlib.machinery
import sys

_MODULE = "rankwise.errors"
FOLDER_VARIABLE = "RANKWISE_TESTS_ERRORS"


class _Finder:
    """Finds `rankwise.errors` as Python does, and lets it record what it raises."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            execute, folder = spec.loader.exec_module, self._folder

            def exec_module(module: object) -> None:
                execute(module)  # type: ignore[arg-type]
                _patch(module.RankwiseError, folder)  # type: ignore[attr-defined]

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch(root: type[Exception], folder: str) -> None:
    """Let each error of a tree of classes append its class and text to a file of this process."""
    seen: set[tuple[str, str]] = set()

    def __init__(self: Exception, *args: object, **keywords: object) -> None:  # noqa: N807 - it becomes one
        super(root, self).__init__(*args, **keywords)  # of ImportError, for example, which takes a name
        text = type(self).__name__, str(args[0]) if args else ""
        if text not in seen:
            seen.add(text)
            _append(folder, text)

    root.__init__ = __init__  # type: ignore[method-assign, assignment]


def _append(folder: str, text: tuple[str, str]) -> None:
    import json  # noqa: PLC0415 - not when an interpreter starts
    import os  # noqa: PLC0415 - likewise

    try:
        file = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError:  # of another user, or without descriptors, as some tests have it
        return
    try:
        os.write(file, json.dumps(text).encode() + b"\n")
    finally:
        os.close(file)


def to(folder: str) -> None:
    """Record into files of this folder."""
    sys.meta_path.insert(0, _Finder(folder))  # type: ignore[arg-type]


def pytest_configure(config: object) -> None:  # noqa: ARG001 - a hook of pytest
    """Record in pytest's process too, where pytest's own finder has loaded the module: it rewrites plugins."""
    import os  # noqa: PLC0415 - not when an interpreter starts

    from rankwise.errors import RankwiseError  # noqa: PLC0415 - likewise

    if "__init__" not in vars(RankwiseError):
        _patch(RankwiseError, os.environ[FOLDER_VARIABLE])
