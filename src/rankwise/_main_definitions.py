"""The functions and classes that `__main__` defines, and fingerprints to compare them between processes."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary

# The second is its name in a process that `multiprocessing` or a launcher started, which imports it as a module.
NAMES_OF_MAIN: Final = ("__main__", "__mp_main__")
# The attributes that define dataclasses, enums, named tuples and classes with slots, in addition to functions.
_MEMBERS: Final = ("__dataclass_fields__", "_member_map_", "_fields", "__slots__")

_fingerprints: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def name_in_main(definition: Any) -> str | None:  # noqa: ANN401 - any function or class
    """Return the name under which `__main__` defines a function or class; None if it does not."""
    if getattr(definition, "__module__", None) not in NAMES_OF_MAIN:
        return None
    name = str(definition.__qualname__)
    return name if _find(name) is definition else None


def same_definition(name: str, fingerprint: str) -> Any:  # noqa: ANN401 - any function or class
    """Return the definition of this name in `__main__` if it has the same fingerprint; None if not."""
    found = _find(name)
    return found if found is not None and fingerprint_of(found) == fingerprint else None


def define_in_main(name: str, definition: Any) -> None:  # noqa: ANN401 - any function or class
    """Define a name in `__main__`, unless it is defined already."""
    if "." not in name:
        vars(sys.modules["__main__"]).setdefault(name, definition)


def fingerprint_of(definition: Any) -> str:  # noqa: ANN401 - any value
    """Return a digest that is equal in all processes that run the same script, and differs if the definition does.

    Values that may change after the definition, such as attributes of a class, are not part of it.
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


def _find(name: str) -> Any:  # noqa: ANN401 - any value
    found: Any = sys.modules.get("__main__")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _of_class(definition: type) -> tuple[object, ...]:
    functions = sorted((name, _of_function(function)) for name, function in _functions(definition))
    members = [(name, _names(definition, name)) for name in _MEMBERS if name in vars(definition)]
    return [base.__qualname__ for base in definition.__bases__], functions, members


def _functions(definition: type) -> Iterator[tuple[str, FunctionType]]:
    """Iterate over the functions in the body of a class."""
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
    """Return the parts of a code object that depend on its source alone, and not on the version of Python."""
    constants = [_of_constant(constant) for constant in code.co_consts]
    return code.co_name, code.co_firstlineno, code.co_varnames, code.co_freevars, code.co_names, constants


def _of_constant(constant: object) -> object:
    if isinstance(constant, CodeType):
        return _of_code(constant)
    if isinstance(constant, frozenset):  # its order differs between processes
        return sorted(map(repr, constant))
    return repr(constant) if isinstance(constant, (int, float, complex, str, bytes, tuple, type(None))) else ""
