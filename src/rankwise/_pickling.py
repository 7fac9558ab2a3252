"""Pickling of any value, for a process that runs the same program, or another one.

Cloudpickle serializes the definitions of `__main__` by value, since `__main__` may differ in the other process. But a
class that is deserialized by value is a new class, and existing objects are not instances of it. So here a definition
of `__main__` is pickled by reference, with its name and fingerprint, and the definitions by value are added to the
pickle. They are used only where `__main__` does not define that name, or defines it differently.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import traceback
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import cloudpickle

from rankwise._main_definitions import NAMES_OF_MAIN, define_in_main, fingerprint_of, name_in_main, same_definition
from rankwise._torch import REBUILD_SPARSE, REBUILD_STORAGE

_PROTOCOL: Final = 5
# Pickles refer to these functions, which `Unpickler` replaces by its methods of the same names.
_UNPICKLER_METHODS: Final = ("_named", "_made", "_put")


class Definitions(NamedTuple):
    """Definitions of `__main__`, pickled by value.

    Attributes:
        pickled: The definitions by their names; b"" if there are none, or they cannot be pickled.
        problem: Why some cannot be pickled.
    """

    pickled: bytes = b""
    problem: str = ""

    @classmethod
    def of(cls, definitions: Mapping[str, object]) -> Definitions:
        """Pickle those definitions that can be pickled."""
        if not definitions:
            return cls()
        try:
            return cls(pickled=_by_value(definitions))
        except Exception:  # noqa: BLE001 - any error of an object's pickling; the definition may not be needed
            _record_unpicklable(definitions)
        picklable = {name: value for name, value in definitions.items() if value not in _unpicklable}
        problem = "; ".join(_unpicklable[value] for value in definitions.values() if value in _unpicklable)
        try:
            return cls(pickled=_by_value(picklable) if picklable else b"", problem=problem)
        except Exception as error:  # noqa: BLE001 - as above
            return cls(problem=f"{problem}; {error}")


_NONE: Final = Definitions()
# Definitions that cannot be pickled by value, and why. Others refer to them by name.
_unpicklable: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def _reduce_file(file: io.TextIOWrapper) -> Any:  # noqa: ANN401 - what pickle takes
    """Refuse an open file, of which cloudpickle would send the contents; not the standard streams."""
    for name in ("stdout", "stderr"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise TypeError(f"cannot pickle the open file {getattr(file, 'name', '')!r}: pass its name, or what is in it")


def _reduce_code(code: CodeType) -> Any:  # noqa: ANN401 - what pickle takes
    """Keep the name of the file: cloudpickle 3.1.3 gives all code one name, and tracebacks then have no lines."""
    _, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code_of_file, (shown_file(code.co_filename), arguments)


def _code_of_file(file: str, arguments: tuple[Any, ...]) -> CodeType:
    return CodeType(*arguments).replace(co_filename=file)


def shown_file(file: str) -> str:
    """Return the name by which a file of code is shown: that of a notebook's cell, "Cell In[3]", is another one."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
    named = shell and shell.compile.format_code_name(file)
    return " ".join(named) if named else file


_DISPATCH_TABLE: Final = cloudpickle.Pickler.dispatch_table.new_child(
    {io.TextIOWrapper: _reduce_file, CodeType: _reduce_code}
)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles the definitions of `__main__` by value, for processes where it does not define those names.

    Attributes:
        referenced: The definitions of `__main__` that it has pickled by reference, by name.
    """

    dispatch_table = _DISPATCH_TABLE

    def __init__(self, file: IO[bytes], *, single: object = None) -> None:
        """Write to a file.

        Args:
            file: The file to write to.
            single: The only definition to pickle by value; by default all that can be are.
        """
        self.referenced: dict[str, object] = {}
        self._single = single
        super().__init__(file, protocol=_PROTOCOL)

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any value of the user's
        kind = type(value)
        if issubclass(kind, ModuleType):  # modules of a subclass, such as torch.backends.cudnn, cannot be pickled
            return _of_module(value) or super().reducer_override(value)
        name = name_in_main(value) if kind is FunctionType or issubclass(kind, type) else None
        if name is None:
            return super().reducer_override(value)
        key = (name, fingerprint_of(value))
        if value in _unpicklable if self._single is None else value is not self._single:
            self.referenced[name] = value
            return _named, key
        reduced = super().reducer_override(value)
        if reduced is NotImplemented:
            return reduced
        make, arguments, state, _, _, put = reduced
        return _made, (*key, make, arguments), (*key, put, state), None, None, _put


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles the definitions of `__main__` by reference, and functions without a name, such as lambdas, by value.

    Attributes:
        referenced: The definitions of `__main__` that it has pickled, by name.
    """

    dispatch_table = _DISPATCH_TABLE

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
        else:
            return NotImplemented  # as cloudpickle's, without its call for each object
        return super().reducer_override(value)


class Unpickler(pickle.Unpickler):
    """Reads the pickles of `Pickler` and `ByValuePickler`."""

    def __init__(
        self,
        file: IO[bytes],
        definitions: Definitions = _NONE,
        *,
        adopting: bool = False,
        on_cpu: bool = False,
        **options: Any,  # noqa: ANN401 - the unpickler's
    ) -> None:
        """Read from a file.

        Args:
            file: The file to read from.
            definitions: The definitions by value; used when a name is not defined here.
            adopting: Also define those functions and classes in `__main__`, so that pickle finds them by name.
            on_cpu: Put tensors on the CPU, whatever device they were on.
            options: Those of `pickle.Unpickler`.
        """
        super().__init__(file, **options)
        self._definitions = definitions
        self._adopting = adopting
        self._on_cpu = on_cpu
        self._read: dict[str, Any] = {}

    def load(self) -> Any:  # noqa: ANN401 - any value
        try:
            return super().load()
        finally:
            # It has the value and methods of this object, which would live until garbage is collected.
            self.memo = {}

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as in pickle
        if module == __name__ and name in _UNPICKLER_METHODS:
            return getattr(self, name)
        if (module, name) == REBUILD_SPARSE:
            return _sparse_tensor
        if (module, name) == REBUILD_STORAGE and self._on_cpu:
            return _storage_on_cpu
        return super().find_class(module, name)

    def _named(self, name: str, fingerprint: str) -> Any:  # noqa: ANN401 - any function or class
        found = same_definition(name, fingerprint)
        if found is not None:
            return found
        pickled, problem = self._definitions
        if pickled and not self._read:
            inner = Unpickler(io.BytesIO(pickled), Definitions(problem=problem), adopting=self._adopting)
            self._read = inner.load()
        if name not in self._read:
            why = f"; its definition cannot be pickled: {problem}" if problem else ""
            raise LookupError(
                f"{name!r} of another process's __main__ is not defined by this one's, or differently{why}; define it "
                "in a module that both import"
            )
        return self._read[name]

    @staticmethod
    def _made(name: str, fingerprint: str, make: Any, arguments: Any) -> Any:  # noqa: ANN401 - cloudpickle's
        found = same_definition(name, fingerprint)
        return make(*arguments) if found is None else found

    def _put(self, value: Any, state: Any) -> None:  # noqa: ANN401 - cloudpickle's
        name, fingerprint, put, inner = state
        if same_definition(name, fingerprint) is value:
            return
        put(value, inner)
        if self._adopting:
            define_in_main(name, value)


def dumps(value: object) -> bytes:
    """Return a value as bytes."""
    stream = io.BytesIO()
    pickler = Pickler(stream)
    pickler.dump(value)
    return encoded(stream, Definitions.of(pickler.referenced))


def dumps_by_value(value: object) -> bytes:
    """Return a value as bytes, for a process whose `__main__` has no definitions.

    Raises:
        TypeError: A definition of `__main__` cannot be pickled by value.
    """
    stream = io.BytesIO()
    pickler = ByValuePickler(stream)
    pickler.dump(value)
    for name, definition in pickler.referenced.items():
        raise TypeError(f"{name!r} refers to something that cannot be pickled: {_unpicklable.get(definition)}")
    return encoded(stream)


def explained(error: Exception, advice: str) -> tuple[str, Exception | None]:
    """Return the text of an error of pickling, and the error as the cause of another one.

    If code of the value did not raise it, but the pickler, the text has all, and the advice: there is no cause.
    """
    modules = {
        frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    }
    return (str(error), error) if modules - {"cloudpickle", "rankwise"} else (f"{error}; {advice}", None)


def encoded(stream: io.BytesIO, definitions: Definitions = _NONE) -> bytes:
    """Return the output of a pickler together with the definitions, in the form that `loads` reads."""
    return pickle.dumps((stream.getvalue(), *definitions), _PROTOCOL)


def loads(data: bytes, *, adopting: bool = False, on_cpu: bool = False) -> Any:  # noqa: ANN401 - any value
    """Return the value that `dumps` has pickled.

    Args:
        data: The result of `dumps`.
        adopting: As for `Unpickler`.
        on_cpu: Likewise.

    Raises:
        LookupError: A definition of another process's `__main__` does not exist here, and could not be
            pickled by value.
    """
    stream, *definitions = pickle.loads(data)
    return Unpickler(io.BytesIO(stream), Definitions(*definitions), adopting=adopting, on_cpu=on_cpu).load()


def _by_value(definitions: Mapping[str, object]) -> bytes:
    stream = io.BytesIO()
    ByValuePickler(stream).dump(dict(definitions))
    return stream.getvalue()


def _record_unpicklable(definitions: Mapping[str, object]) -> None:
    """Record which definitions cannot be pickled by value: of these, and of those that they refer to.

    Each is pickled on its own, so that the error belongs to it and not to one that it refers to.
    """
    pending = list(definitions.values())
    seen: set[int] = set()
    while pending:
        definition = pending.pop()
        if id(definition) in seen:
            continue
        seen.add(id(definition))
        pickler = ByValuePickler(io.BytesIO(), single=definition)
        try:
            pickler.dump(definition)
        except Exception as error:  # noqa: BLE001 - any error of an object's pickling
            _unpicklable[definition] = f"{type(error).__name__}: {error}"
        pending += pickler.referenced.values()


def _of_module(module: ModuleType) -> Any:  # noqa: ANN401 - as in pickle
    """Return the reduction of a module that every process can import; None for other modules."""
    name = module.__name__
    if sys.modules.get(name) is not module:
        return None
    return importlib.import_module, ("__main__" if name in NAMES_OF_MAIN else name,)


def _named(*_: object) -> None:
    """A placeholder in pickles, for the method of `Unpickler`."""
    raise pickle.UnpicklingError("this is read by rankwise alone")


def _made(*_: object) -> None:
    _named()


def _put(*_: object) -> None:
    _named()


def _storage_on_cpu(data: bytes) -> Any:  # noqa: ANN401 - torch's, which a launcher does not import
    """Return the memory of a tensor, as torch pickles it, on the CPU."""
    import torch  # noqa: PLC0415 - as above

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _sparse_tensor(layout: Any, data: tuple[Any, ...]) -> Any:  # noqa: ANN401 - torch's, which a launcher does not import
    """Return a sparse tensor of any layout, given its parts as torch pickles them."""
    import torch  # noqa: PLC0415 - as above; the layout has imported it

    if layout is torch.sparse_coo:
        indices, values, size, *is_coalesced = data
        coalesced = is_coalesced[0] if is_coalesced else None
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=False, is_coalesced=coalesced)
    compressed, plain, values, size = data
    return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=False)
