"""Any value as bytes, for a process that runs the same program, or another one.

Cloudpickle carries what `__main__` defines by value, for it cannot know what `__main__` is elsewhere. But a class that
is carried is another class, to which nothing that exists there belongs. So here it goes by its name, and beside the
pickle go the definitions by value: they are read where `__main__` defines nothing of that name, or something else.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import IO, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import cloudpickle

from rankwise._main_definitions import NAMES_OF_MAIN, adopt, fingerprint_of, local, name_in_main

_PROTOCOL: Final = 5
# What pickles call by these names is the unpickler's.
_STAND_INS: Final = ("_named", "_made", "_put")


class Definitions(NamedTuple):
    """What `__main__` defines, by value.

    Attributes:
        pickled: The definitions by their names; b"" if there are none, or they cannot be pickled.
        problem: Why they cannot.
    """

    pickled: bytes = b""
    problem: str = ""

    @classmethod
    def of(cls, definitions: Mapping[str, object]) -> Definitions:
        """Pickle definitions, if that is possible."""
        if not definitions:
            return cls()
        try:
            return cls(pickled=_by_value(definitions))
        except Exception:  # noqa: BLE001 - whatever an object says of it; it may not be needed
            _note_uncarried(definitions)
        carried = {name: value for name, value in definitions.items() if value not in _uncarried}
        problem = "; ".join(_uncarried[value] for value in definitions.values() if value in _uncarried)
        try:
            return cls(pickled=_by_value(carried) if carried else b"", problem=problem)
        except Exception as error:  # noqa: BLE001 - as above
            return cls(problem=f"{problem}; {error}")


_NONE: Final = Definitions()
# Definitions that cannot be carried, and why. Others refer to them by name.
_uncarried: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Carries what `__main__` defines by value, for processes where it defines nothing of that name.

    Attributes:
        referenced: What it has met of that and carries by name, by its names.
    """

    def __init__(self, file: IO[bytes], *, alone: object = None) -> None:
        """Write to a file.

        Args:
            file: What to write to.
            alone: Carry this by value and the rest by name; by default, by value whatever can be.
        """
        self.referenced: dict[str, object] = {}
        self._alone = alone
        super().__init__(file, protocol=_PROTOCOL)

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any value of the user's
        kind = type(value)
        if issubclass(kind, ModuleType):  # those of classes of their own cannot be pickled, as torch.backends.cudnn
            return _of_module(value) or super().reducer_override(value)
        name = name_in_main(value) if kind is FunctionType or issubclass(kind, type) else None
        if name is None:
            return super().reducer_override(value)
        key = (name, fingerprint_of(value))
        if value in _uncarried if self._alone is None else value is not self._alone:
            self.referenced[name] = value
            return _named, key
        reduced = super().reducer_override(value)
        if reduced is NotImplemented:
            return reduced
        make, arguments, state, _, _, put = reduced
        return _made, (*key, make, arguments), (*key, put, state), None, None, _put


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Carries what `__main__` defines by name, and what has none, as a lambda, by value.

    Attributes:
        referenced: What it has met that `__main__` defines, by its names.
    """

    def __init__(self, file: IO[bytes], *, protocol: int = _PROTOCOL, **options: Any) -> None:  # noqa: ANN401 - pickle's
        self.referenced: dict[str, object] = {}
        super().__init__(file, protocol=protocol, **options)

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any value of the user's
        kind = type(value)
        if kind is FunctionType or issubclass(kind, type):
            name = name_in_main(value)
            if name is not None:
                self.referenced[name] = value
                return _named, (name, fingerprint_of(value))
        elif issubclass(kind, ModuleType):
            return _of_module(value) or super().reducer_override(value)
        return super().reducer_override(value)


class Unpickler(pickle.Unpickler):
    """Reads what `Pickler` and `ByValue` write."""

    def __init__(
        self,
        file: IO[bytes],
        definitions: Definitions = _NONE,
        *,
        adopting: bool = False,
        **options: Any,  # noqa: ANN401 - the unpickler's
    ) -> None:
        """Read from a file.

        Args:
            file: What was written.
            definitions: What came with it; read once something is not defined here.
            adopting: Functions and classes that `__main__` does not define, it defines from now on, so that pickle
                finds them by their names.
            options: Those of pickle's own.
        """
        super().__init__(file, **options)
        self._definitions = definitions
        self._adopting = adopting
        self._read: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - what pickle asks for
        if module == __name__ and name in _STAND_INS:
            return getattr(self, name)
        return super().find_class(module, name)

    def _named(self, name: str, fingerprint: str) -> Any:  # noqa: ANN401 - any function or class
        found = local(name, fingerprint)
        if found is not None:
            return found
        pickled, problem = self._definitions
        if pickled and not self._read:
            inner = Unpickler(io.BytesIO(pickled), Definitions(problem=problem), adopting=self._adopting)
            self._read = inner.load()
        if name not in self._read:
            why = f"; its definition cannot be carried: {problem}" if problem else ""
            raise LookupError(
                f"{name!r} of another process's __main__ is not defined by this one's, or differently{why}; define it "
                "in a module that both import"
            )
        return self._read[name]

    @staticmethod
    def _made(name: str, fingerprint: str, make: Any, arguments: Any) -> Any:  # noqa: ANN401 - cloudpickle's
        found = local(name, fingerprint)
        return make(*arguments) if found is None else found

    def _put(self, value: Any, state: Any) -> None:  # noqa: ANN401 - cloudpickle's
        name, fingerprint, put, inner = state
        if local(name, fingerprint) is value:
            return
        put(value, inner)
        if self._adopting:
            adopt(name, value)


def dumps(value: object) -> bytes:
    """Return a value as bytes."""
    stream = io.BytesIO()
    pickler = Pickler(stream)
    pickler.dump(value)
    return encoded(stream, Definitions.of(pickler.referenced))


def dumps_by_value(value: object) -> bytes:
    """Return a value as bytes, for a process whose `__main__` defines nothing.

    Raises:
        TypeError: Something that `__main__` defines cannot be pickled.
    """
    stream = io.BytesIO()
    pickler = ByValue(stream)
    pickler.dump(value)
    for name, definition in pickler.referenced.items():
        raise TypeError(f"{name!r} refers to something that cannot be pickled: {_uncarried.get(definition)}")
    return encoded(stream)


def encoded(stream: io.BytesIO, definitions: Definitions = _NONE) -> bytes:
    """Return what a pickler has written, with the definitions beside it, as `loads` reads it."""
    return pickle.dumps((stream.getvalue(), *definitions), _PROTOCOL)


def loads(data: bytes, *, adopting: bool = False) -> Any:  # noqa: ANN401 - what was pickled
    """Return the value of which these are the bytes.

    Args:
        data: What `dumps` has returned.
        adopting: As for `Unpickler`.

    Raises:
        LookupError: What another process's `__main__` defines is not defined here, and cannot be carried.
    """
    stream, *definitions = pickle.loads(data)
    return Unpickler(io.BytesIO(stream), Definitions(*definitions), adopting=adopting).load()


def _by_value(definitions: Mapping[str, object]) -> bytes:
    stream = io.BytesIO()
    ByValue(stream).dump(dict(definitions))
    return stream.getvalue()


def _note_uncarried(definitions: Mapping[str, object]) -> None:
    """Find out which definitions cannot be carried: of these, and of those that they refer to."""
    pending = list(definitions.values())
    seen: set[int] = set()
    while pending:
        definition = pending.pop()
        if id(definition) in seen:
            continue
        seen.add(id(definition))
        pickler = ByValue(io.BytesIO(), alone=definition)
        try:
            pickler.dump(definition)
        except Exception as error:  # noqa: BLE001 - whatever an object says of it
            _uncarried[definition] = f"{type(error).__name__}: {error}"
        pending += pickler.referenced.values()


def _of_module(module: ModuleType) -> Any:  # noqa: ANN401 - what pickle takes
    """Return how a module is found that every process can import; None for others."""
    name = module.__name__
    if sys.modules.get(name) is not module:
        return None
    return importlib.import_module, ("__main__" if name in NAMES_OF_MAIN else name,)


def _named(*_: object) -> None:
    """Stands in a pickle for the reading process's own."""
    raise pickle.UnpicklingError("this is read by rankwise alone")


def _made(*_: object) -> None:
    _named()


def _put(*_: object) -> None:
    _named()
