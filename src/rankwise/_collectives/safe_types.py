"""The definitions that pickles may refer to with `safe=True`, and the functions that make arrays and parameters there.

Each has a placeholder, with which a pickle can be inspected: it allows the steps that pickles of such values need.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch

from rankwise._collectives.out_of_band import out_of_band_array, out_of_band_tensor, set_attributes
from rankwise._main_definitions import NAMES_OF_MAIN, fingerprint_of
from rankwise.errors import InvalidArgumentError, PayloadTypeError, shown

T = TypeVar("T")

# The kinds of numpy's dtypes whose memory is the value; that of others refers to objects.
_KINDS_WITHOUT_REFERENCES: Final = frozenset("biufcSUVmM")


class Placeholder:
    """Stands for a value while a pickle is inspected."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("only values of registered types have a state")


class _Function(Placeholder):
    """Stands for a function, or for a class whose instances have neither items nor a state."""

    __slots__ = ()

    def __call__(self, *_: object) -> Placeholder:
        return Placeholder()


class _Instance(Placeholder):
    """Stands for an instance of a container or of a registered type, and the class for that type."""

    __slots__ = ()

    def __new__(cls, *_: object, **__: object) -> _Instance:  # noqa: PYI034 - no subclasses
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    extend = add = append


class SafeDefinition(NamedTuple):
    """A definition that a pickle may refer to.

    Attributes:
        value: The definition.
        placeholder: What stands for it while a pickle is inspected.
    """

    value: Any
    placeholder: Any


def register_safe(kind: type[T]) -> type[T]:
    """Allow values of a class in collectives with `safe=True`, and return the class.

    Local. It can be used as a decorator. Values of the class are made as pickle makes them: its `__new__`, `__init__`
    or `__setstate__` run with what other ranks have sent. Its subclasses, and the classes of its attributes, have to be
    registered too. All ranks register the same classes.

    Args:
        kind: The class, which can be imported, or is defined by the script.

    Raises:
        InvalidArgumentError: It is not a class, or is defined in a function.

    Example:
        >>> import datetime, rankwise
        >>> rankwise.register_safe(datetime.date)
        <class 'datetime.date'>
        >>> rankwise.broadcast(datetime.date(2024, 2, 29), safe=True)
        datetime.date(2024, 2, 29)
    """
    if not isinstance(kind, type):
        raise InvalidArgumentError(f"register_safe takes a class, got {shown(kind)}")
    if "<locals>" in kind.__qualname__:
        raise InvalidArgumentError(
            f"{kind.__qualname__} is defined in a function, where other ranks cannot find it: define it in a module"
        )
    _definitions[_module_of(kind), kind.__qualname__] = SafeDefinition(kind, _Instance)
    return kind


def safe_definition(module: str, name: str) -> SafeDefinition | None:
    """Return a definition that is safe or registered; None for any other."""
    return _definitions.get((module, name))


def safe_definition_of_main(name: str, fingerprint: str) -> SafeDefinition | None:
    """Return a registered class of `__main__`; None if there is none, or it is defined differently here."""
    found = _definitions.get((NAMES_OF_MAIN[0], name))
    return found if found is not None and fingerprint_of(found.value) == fingerprint else None


def make_parameter(data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """Return a parameter."""
    return torch.nn.Parameter(data, requires_grad=requires_grad)


def make_dtype(description: Any) -> Any:  # noqa: ANN401 - numpy's
    """Return the dtype of a description by `described_dtype`."""
    from numpy.lib.format import descr_to_dtype  # noqa: PLC0415 - no part of rankwise's dependencies

    return descr_to_dtype(description)


def make_array_scalar(dtype: Any, contents: bytes) -> Any:  # noqa: ANN401 - numpy's
    """Return a scalar of numpy."""
    import numpy as np  # noqa: PLC0415 - as above

    return np.ndarray((), without_references(dtype), bytearray(contents))[()]


def make_object_array(shape: Sequence[int], items: Sequence[object]) -> Any:  # noqa: ANN401 - numpy's
    """Return an array of objects."""
    import numpy as np  # noqa: PLC0415 - as above

    return np.fromiter(items, object, len(items)).reshape(shape)


def described_dtype(dtype: Any) -> Any:  # noqa: ANN401 - numpy's
    """Return a description of a dtype of numpy, in builtin types; None if it has none."""
    try:
        description = dtype.str if dtype.names is None else dtype.descr
        return description if make_dtype(description) == dtype else None
    except (TypeError, ValueError):  # of a package, or with fields that overlap
        return None


def without_references(dtype: Any) -> Any:  # noqa: ANN401 - numpy's
    """Return a dtype whose memory refers to nothing: only such an array can be made of received memory.

    Raises:
        PayloadTypeError: It is another one, or no dtype.
    """
    import numpy as np  # noqa: PLC0415 - as above

    if not isinstance(dtype, np.dtype) or has_references(dtype):
        raise PayloadTypeError(f"an array of {shown(dtype)} cannot be made of memory")
    return dtype


def has_references(dtype: Any) -> bool:  # noqa: ANN401 - numpy's
    """Return whether the memory of a dtype refers to other memory."""
    if dtype.subdtype is not None:
        return has_references(dtype.base)
    if dtype.names is not None:
        return any(has_references(dtype[name]) for name in dtype.names)
    return dtype.hasobject or dtype.kind not in _KINDS_WITHOUT_REFERENCES


def _module_of(definition: Any) -> str:  # noqa: ANN401 - a function or class
    module: str = definition.__module__
    return NAMES_OF_MAIN[0] if module in NAMES_OF_MAIN else module


def _named(definitions: Sequence[Any], placeholder: Any) -> dict[tuple[str, str], SafeDefinition]:  # noqa: ANN401
    return {(one.__module__, one.__qualname__): SafeDefinition(one, placeholder) for one in definitions}


_FUNCTIONS: Final[list[Callable[..., Any]]] = [
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, slice, range),
    collections.Counter,
    torch.Size,
    torch.device,
    make_parameter,
    make_dtype,
    make_array_scalar,
    make_object_array,
    out_of_band_tensor,
    out_of_band_array,
    set_attributes,
]
_CONTAINERS: Final = [collections.OrderedDict, collections.defaultdict, collections.deque]
# Quantized tensors are not made of memory alone.
_DTYPES: Final = {name: one for name, one in vars(torch).items() if isinstance(one, torch.dtype) and name[0] != "q"}

_definitions: Final = {
    **_named(_FUNCTIONS, _Function()),
    **_named(_CONTAINERS, _Instance),
    **{("torch", name): SafeDefinition(dtype, Placeholder()) for name, dtype in _DTYPES.items()},
    ("builtins", "Ellipsis"): SafeDefinition(..., Placeholder()),
}
