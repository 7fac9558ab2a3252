"""The main module of the caller's process, and its import in ranks of a function.

Ranks import it as processes that `multiprocessing` spawns do: under another name than `__main__`, so that statements
below `if __name__ == "__main__"` do not run. If the call of `launch` has no such guard, the import would call it again
in each rank: then ranks do not import the module, and its definitions are pickled by value, as those of a notebook.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import io
import linecache
import multiprocessing
import os
import symtable
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, cast

from rankwise._launch.standard_streams import STANDARD_INPUT
from rankwise._main_definitions import NAMES_OF_MAIN
from rankwise.errors import LaunchError

_IMPORTED: Final = NAMES_OF_MAIN[1]
_Uses = dict[str, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MainModule:
    """A main module that ranks can import.

    Attributes:
        path: Its file.
        name: Its name, if `python -m`, a folder or an archive was run; "" for a script.
        late: The variables that an import leaves unset, or sets to other values than the caller's.
        uses: The variables that each of its definitions refers to.
    """

    path: str
    name: str = ""
    late: frozenset[str] = field(default=frozenset(), compare=False)
    uses: _Uses = field(default_factory=dict, compare=False)

    @classmethod
    def find(cls) -> MainModule | None:
        """Return the main module of this process; None if ranks cannot import it.

        Raises:
            LaunchError: This process is importing it.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise LaunchError(
                "a process that was started to run a function is importing the main script, and that starts ranks "
                'again: put the call that starts them below if __name__ == "__main__":'
            )
        main = sys.modules.get("__main__")
        path = getattr(main, "__file__", None)
        if main is None or not path:
            return None
        path = os.path.abspath(path)  # noqa: PTH100 - symbolic links are kept, as in __file__
        source = _source(main, path)
        if source is None:
            return None
        try:
            tree, table = ast.parse(source), symtable.symtable(source, path, "exec")  # type: ignore[arg-type]  # bytes too
        except (SyntaxError, ValueError):
            return None  # a compiled file, or a program in another language
        guards = _guards(tree)
        if main.__name__ != _IMPORTED and not _is_called_from(guards, main):
            return None
        spec = getattr(main, "__spec__", None)
        return cls(path=path, name="" if spec is None else spec.name, late=_late(tree, guards), uses=_uses(table))

    def late_for(self, names: Iterable[str]) -> set[str]:
        """Return the late variables that definitions of these names refer to, directly or through other definitions."""
        reached: set[str] = set()
        pending = [name.partition(".")[0] for name in names]
        while pending:
            for used in self.uses.get(pending.pop(), frozenset()) - reached:
                reached.add(used)
                pending.append(used)
        return reached & self.late

    def load(self) -> None:
        """Import the module into this process, as its `__main__`.

        Raises:
            LaunchError: The module ends the process, or starts ranks.
        """
        module = ModuleType(_IMPORTED)
        code = self._code(module)
        sys.modules["__main__"] = sys.modules[_IMPORTED] = module
        process = multiprocessing.current_process()
        process._inheriting = True  # type: ignore[attr-defined]  # noqa: SLF001 - so that nobody starts processes
        try:
            exec(code, module.__dict__)  # noqa: S102 - the user's module
        except SystemExit as error:
            raise LaunchError(
                f"{self.path} ends the process ({error!r}) when ranks import it for its definitions; put statements "
                'that are not for them below if __name__ == "__main__":'
            ) from error
        finally:
            del process._inheriting  # type: ignore[attr-defined]  # noqa: SLF001
        for definition in list(vars(module).values()):
            _set_module(definition)

    def _code(self, module: ModuleType) -> CodeType:
        """Return the code to execute, and set the module's attributes."""
        if not self.name:
            return prepare_script(module, self.path)
        if self.name == "__main__":  # of a folder or an archive
            spec = importlib.machinery.PathFinder.find_spec(self.name, [os.path.dirname(self.path)])  # noqa: PTH120
        else:
            spec = importlib.util.find_spec(self.name)
        loader: Any = None if spec is None else spec.loader
        code = loader.get_code(self.name) if hasattr(loader, "get_code") else None
        if spec is None or code is None:
            raise LaunchError(f"ranks cannot import {self.name} ({self.path}), which this program was started with")
        module.__dict__.update(
            __spec__=spec, __loader__=loader, __package__=spec.parent, __file__=spec.origin, __cached__=spec.cached
        )
        return cast("CodeType", code)  # the result of a loader


def prepare_script(module: ModuleType, path: str) -> CodeType:
    """Return the code of a script, and set the attributes of a module as the interpreter sets those of `__main__`."""
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__cached__"] = None
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def prepare_piped_script(module: ModuleType, name: str, source: bytes) -> CodeType:
    """Do the same for a script that the launcher has read from standard input or another pipe."""
    if name == STANDARD_INPUT:
        name = "<stdin>"
    else:
        module.__file__ = name
    lines = source.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)  # for tracebacks: it cannot be read again
    return compile(source, name, "exec", dont_inherit=True)


def _source(main: ModuleType, path: str) -> bytes | None:
    loader: Any = getattr(main, "__loader__", None)
    try:
        if hasattr(loader, "get_data"):
            return bytes(loader.get_data(path))
        with io.open_code(path) as file:
            return file.read()
    except OSError:
        return None


def _guards(tree: ast.AST) -> list[ast.If]:
    """Return the `if` statements that compare the module's name."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.If) and _compares_name(node.test)]


def _compares_name(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(map(_compares_name, test.values))
    sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
    return any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)


def _is_called_from(guards: Collection[ast.If], main: ModuleType) -> bool:
    """Return whether the statement that `main` executes now is guarded."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented
    line = 0
    while frame is not None:
        if frame.f_globals is main.__dict__ and frame.f_code.co_name == "<module>":
            line = frame.f_lineno
        frame = frame.f_back
    return any(guard.lineno <= line <= (guard.end_lineno or 0) for guard in guards)


def _late(tree: ast.AST, guards: Collection[ast.If]) -> frozenset[str]:
    """Return the variables that are set by guarded statements, or declared `global` in functions."""
    names = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for guard in guards:
        for node in ast.walk(guard):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name.partition(".")[0])
    return frozenset(names)


def _uses(table: symtable.SymbolTable) -> _Uses:
    """Return the module's variables that each of its functions and classes refers to."""
    uses: dict[str, frozenset[str]] = {}
    for child in table.get_children():
        uses[child.get_name()] = uses.get(child.get_name(), frozenset()) | frozenset(_globals(child))
    return uses


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_global() or (table.get_type() == "class" and symbol.is_referenced()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals(child)


def _set_module(definition: object) -> None:
    """Set `__module__` of a function or class to `__main__`, as in the caller: it is pickled under that name."""
    if getattr(definition, "__module__", None) != _IMPORTED:
        return
    if isinstance(definition, type):
        type.__setattr__(definition, "__module__", "__main__")
        for inner in list(vars(definition).values()):
            if isinstance(inner, type):
                _set_module(inner)
    elif hasattr(definition, "__code__"):
        definition.__module__ = "__main__"
