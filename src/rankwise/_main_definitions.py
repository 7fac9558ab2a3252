"""What a process's `__main__` defines, and how another process knows whether it defines the same."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary

# The second is its name where `multiprocessing` or a launcher has imported it in a process that it did not start.
NAMES_OF_MAIN: Final = ("__main__", "__mp_main__")
# What dataclasses, enums, named tuples and classes with slots consist of, besides functions.
_MEMBERS: Final = ("__dataclass_fields__", "_member_map_", "_fields", "__slots__")

_fingerprints: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def name_in_main(definition: Any) -> str | None:  # noqa: ANN401 - any function or class
    """Return under which name `__main__` defines a function or class; None if it does not."""
    if getattr(definition, "__module__", None) not in NAMES_OF_MAIN:
        return None
    name = str(definition.__qualname__)
    return name if _found(name) is definition else None


def local(name: str, fingerprint: str) -> Any:  # noqa: ANN401 - any function or class
    """Return what this process's `__main__` defines under a name, if it is the same; None if not."""
    found = _found(name)
    return found if found is not None and fingerprint_of(found) == fingerprint else None


def adopt(name: str, definition: Any) -> None:  # noqa: ANN401 - any function or class
    """Let `__main__` define something too, unless it defines something else of that name."""
    if "." not in name:
        vars(sys.modules["__main__"]).setdefault(name, definition)


def fingerprint_of(definition: Any) -> str:  # noqa: ANN401 - whatever has the name
    """Return what is the same in all processes that run the same script, and differs where the definition does.

    What may change after the definition, such as a class's attributes, is not part of it.
    """
    if not isinstance(definition, (type, FunctionType)):
        return ""
    known = _fingerprints.get(definition)
    if known is None:
        home = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "")  # noqa: PTH119
        parts = _of_function(definition) if isinstance(definition, FunctionType) else _of_class(definition)
        text = repr((home, definition.__qualname__, parts))
        known = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()
        _fingerprints[definition] = known
    return known


def _found(name: str) -> Any:  # noqa: ANN401 - whatever has the name
    found: Any = sys.modules.get("__main__")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _of_class(definition: type) -> tuple[object, ...]:
    functions = sorted((name, _of_function(function)) for name, function in _functions(definition))
    members = [(name, _names(definition, name)) for name in _MEMBERS if name in vars(definition)]
    return [base.__qualname__ for base in definition.__bases__], functions, members


def _functions(definition: type) -> Iterator[tuple[str, FunctionType]]:
    """Give the functions that a class was defined with."""
    for name, attribute in list(vars(definition).items()):
        function = attribute
        if isinstance(attribute, (staticmethod, classmethod)):
            function = attribute.__func__
        elif isinstance(attribute, property):
            function = attribute.fget
        elif isinstance(attribute, functools.cached_property):
            function = attribute.func
        if isinstance(function, FunctionType) and function.__qualname__ == f"{definition.__qualname__}.{name}":
            yield name, function


def _names(definition: type, attribute: str) -> list[object]:
    members = vars(definition)[attribute]
    if attribute == "_member_map_":
        return [(name, _of_constant(member._value_)) for name, member in members.items()]
    return [members] if isinstance(members, str) else list(members)


def _of_function(function: FunctionType) -> tuple[object, ...]:
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return *_of_code(function.__code__), list(map(_of_constant, defaults))


def _of_code(code: CodeType) -> tuple[object, ...]:
    """Return what source of a function says, and not how this interpreter has compiled it."""
    constants = [_of_constant(constant) for constant in code.co_consts]
    return code.co_name, code.co_firstlineno, code.co_varnames, code.co_freevars, code.co_names, constants


def _of_constant(constant: object) -> object:
    if isinstance(constant, CodeType):
        return _of_code(constant)
    if isinstance(constant, frozenset):  # in another order in each process
        return sorted(map(repr, constant))
    return repr(constant) if isinstance(constant, (int, float, complex, str, bytes, tuple, type(None))) else ""
