"""A function and its arguments, serialized by the caller for the ranks."""

from __future__ import annotations

import io
import linecache
import multiprocessing
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rankwise._launch.interpreter import search_path
from rankwise._launch.main_module import MainModule
from rankwise._pickling import Definitions, Pickler, dumps_by_value, encoded, explained, loads, shown_file
from rankwise.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A call of a function in ranks, and the state of the caller's process that it needs.

    Attributes:
        pickled: The function, its arguments, and the variables of `__main__` that the import of `main` does not set.
        main: The main module, which the rank imports first; None if there is none to import.
        search_path: The caller's `sys.path`.
        start_method: The start method of `multiprocessing`, if the caller has set one.
        authkey: The key that a `multiprocessing.Manager` of the caller expects from its processes.
        setup: The function to call before the caller's modules are imported, as "module:function".
        sources: The lines of code that is in no file, such as the cells of a notebook, for tracebacks.
    """

    pickled: bytes
    main: MainModule | None = None
    search_path: tuple[str, ...] = ()
    start_method: str | None = None
    authkey: bytes = b""
    setup: str = ""
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...], *, setup: str = "") -> FunctionCall:
        """Serialize a call, in the thread that makes it.

        Raises:
            InvalidArgumentError: The function or an argument cannot be pickled.
            LaunchError: This process is importing the main script.
        """
        main = MainModule.find()
        try:
            pickled = dumps_by_value((fn, args, {})) if main is None else _by_name(fn, args, main)
        except Exception as error:  # noqa: BLE001 - any error of an object
            text, cause = explained(error, "create it in the function")
            raise InvalidArgumentError(
                f"{_unpicklable(fn, args)} cannot be carried to other processes: {text}"
            ) from cause
        return cls(
            pickled=pickled,
            main=main,
            search_path=search_path(),
            start_method=multiprocessing.get_start_method(allow_none=True),
            authkey=bytes(multiprocessing.current_process().authkey),
            setup=setup,
            sources=_sources_for(pickled),
        )

    def prepare(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Set the caller's state in this process, and return the function and its arguments."""
        sys.path[:] = self.search_path
        for name, lines in self.sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
        if self.authkey:
            multiprocessing.current_process().authkey = self.authkey
        if self.start_method is not None:
            multiprocessing.set_start_method(self.start_method, force=True)
        if self.setup:
            pkgutil.resolve_name(self.setup)()
        if self.main is not None:
            self.main.load()
        fn, args, variables = loads(self.pickled, adopting=True)
        vars(sys.modules["__main__"]).update(variables)
        return fn, args


def _sources_for(pickled: bytes) -> dict[str, Sequence[str]]:
    """Return the lines of the code in a pickle that is in no file, by the names that it has there."""
    entries = [entry for entry in linecache.cache.values() if len(entry) == 4 and entry[1] is None]  # others are files
    kept = {shown_file(name): lines for _, _, lines, name in entries}
    return {name: lines for name, lines in kept.items() if name.encode() in pickled}


def _unpicklable(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return which part of a call cannot be pickled, as far as it can be told."""
    keywords = fn.keywords if isinstance(fn, partial) else {}
    for name, value in [*enumerate(args, 1), *keywords.items()]:
        try:
            dumps_by_value(value)
        except Exception:  # noqa: BLE001 - any error of an object
            return f"argument {name!r}, a {type(value).__qualname__},"
    return "the function or its arguments"


def _by_name(fn: Callable[..., Any], args: tuple[Any, ...], main: MainModule) -> bytes:
    """Pickle a call for ranks that import `main`, with the variables that the import does not set."""
    variables: dict[str, Any] = {}
    refused: set[str] = set()
    # Pickling finds the definitions that the call refers to; these refer to variables, whose values, once they are
    # pickled too, may refer to more definitions. So pickle again until no variable is missing.
    while True:
        stream = io.BytesIO()
        pickler = Pickler(stream)
        pickler.dump((fn, args, variables))
        wanted = main.late_for(pickler.referenced) - variables.keys() - refused
        if not wanted:
            # Definitions that the import gives are not sent.
            missing = {name: pickler.referenced[name] for name in pickler.referenced if _is_late(name, main)}
            return encoded(stream, Definitions.of(missing))
        here = vars(sys.modules["__main__"])
        found = {name: here[name] for name in wanted if name in here}
        variables |= _picklable(found)
        refused |= wanted - variables.keys()


def _is_late(name: str, main: MainModule) -> bool:
    return name.partition(".")[0] in main.late


def _picklable(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that can be pickled. The function may never use the others."""
    kept = {}
    for name, value in variables.items():
        try:
            Pickler(io.BytesIO()).dump(value)
        except Exception:  # noqa: BLE001, S112 - any error of an object
            continue
        kept[name] = value
    return kept
