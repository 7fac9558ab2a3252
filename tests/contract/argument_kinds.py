"""Values of every kind that a user may pass by mistake; each is made anew by a function."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import fractions
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence

from tests.contract.tensor_kinds import MODULES, TENSORS, parameter

# torch_xla 2.9 has crashed where two ranks that are threads made tensors of a type that it does not have.
_making = threading.Lock()

DEPTH = 1000


class Pair(NamedTuple):
    first: Any
    second: Any


class Level(enum.IntEnum):
    LOW = 0


class Name(str):
    """A subclass of str."""

    __slots__ = ()


class Count(int):
    """A subclass of int."""


@dataclass
class Unset:
    """A dataclass with a field that may have no value."""

    loss: Any = 1.0
    later: Any = field(init=False)


class Hostile:
    """An object that raises in every operation."""

    def __refuse(self, *_: Any) -> Any:
        raise KeyError("this object refuses every operation")

    __repr__ = __str__ = __len__ = __index__ = __float__ = __bool__ = __eq__ = __hash__ = __refuse
    __reduce_ex__ = __getattr__ = __refuse


def deep(wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1.0
    for _ in range(DEPTH):
        value = wrap(value)
    return value


def cyclic_list() -> Any:
    value: list[Any] = [1.0]
    value.append(value)
    return value


def cyclic_dict() -> Any:
    value: dict[str, Any] = {"a": 1.0}
    value["b"] = [value]
    return value


def cyclic_dataclass() -> Any:
    value = Unset()
    value.later = {"self": value}
    return value


def filled(later: Any) -> Unset:
    value = Unset()
    value.later = later
    return value


PLAIN: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "empty string": lambda: "",
    "string": lambda: "odd",
    "string of a number": lambda: "0",
    "surrogate": lambda: "\udc80",
    "zero byte": lambda: "a\0b",
    "sum": lambda: "sum",
    "SUM": lambda: "SUM",
    "str subclass": lambda: Name("sum"),
    "bytes": lambda: b"sum",
    "bytearray": lambda: bytearray(b"sum"),
    "memoryview": lambda: memoryview(b"sum"),
    "zero": lambda: 0,
    "one": lambda: 1,
    "minus one": lambda: -1,
    "minus two": lambda: -2,
    "hundred": lambda: 100,
    "True": lambda: True,
    "False": lambda: False,
    "half": lambda: 0.5,
    "zero float": lambda: 0.0,
    "nan": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "huge float": lambda: 1.7e308,
    "2**63": lambda: 2**63,
    "10**400": lambda: 10**400,
    "-10**400": lambda: -(10**400),
    "10**5000": lambda: 10**5000,
    "complex": lambda: 1j,
    "Decimal": lambda: decimal.Decimal("1.5"),
    "Fraction": lambda: fractions.Fraction(1, 2),
    "timedelta": lambda: dt.timedelta(seconds=5),
    "IntEnum": lambda: Level.LOW,
    "int subclass": lambda: Count(0),
    "enum class": lambda: Level,
    "class": lambda: int,
    "object": object,
    "function": lambda: parameter,
    "lambda": lambda: lambda: 0,
    "module of Python": lambda: types,
    "lock": threading.Lock,
    "generator": lambda: (value for value in [torch.ones(2)]),
    "iterator": lambda: iter([torch.ones(2)]),
    "Hostile": Hostile,
}

CONTAINERS: dict[str, Callable[[], Any]] = {
    "empty list": list,
    "empty tuple": tuple,
    "empty dict": dict,
    "dict": lambda: {"b": 1, "a": [2.5, torch.ones(3)]},
    "list": lambda: [1, 2.5, None, True],
    "tuple": lambda: (0,),
    "list of a string": lambda: ["a"],
    "list of a tensor": lambda: [torch.ones(2)],
    "two tensors": lambda: [torch.ones(2), torch.ones(2)],
    "two types": lambda: [torch.ones(2), torch.ones(2, dtype=torch.int64)],
    "parameters": lambda: [parameter(torch.ones_like), parameter()],
    "list of a list": lambda: [[torch.ones(2)]],
    "list of None": lambda: [None],
    "list of a lock": lambda: [threading.Lock()],
    "Hostile in a list": lambda: [Hostile()],
    "bool in a list": lambda: [True],
    "numpy integer in a list": lambda: [np.int64(0)],
    "set": lambda: {1},
    "frozenset": lambda: frozenset({1}),
    "range": lambda: range(1),
    "deque": lambda: collections.deque([1.0], maxlen=3),
    "OrderedDict": lambda: collections.OrderedDict(b=1, a=2.0),
    "defaultdict": lambda: collections.defaultdict(list, a=1.0),
    "Counter": lambda: collections.Counter("aab"),
    "UserDict": lambda: collections.UserDict(a=1.0),
    "UserList": lambda: collections.UserList([1.0]),
    "ChainMap": lambda: collections.ChainMap({"a": 1.0}),
    "mappingproxy": lambda: types.MappingProxyType({"a": 1.0}),
    "dict of floats": lambda: {1.5: 1.0},
    "dict of None": lambda: {None: 1.0},
    "dict of mixed keys": lambda: {"a": 1.0, 1: 2.0, Level.LOW: 1.0, ("a", 1): 2},
    "dict of nan": lambda: {float("nan"): 1.0},
    "dict of bytes": lambda: {b"a": 1.0},
    "dict views": {"a": torch.ones(2)}.items,
    "namedtuple": lambda: Pair(1.0, torch.ones(2)),
    "structseq": lambda: torch.max(torch.ones(2, 2), dim=0),
    "torch.Size": lambda: torch.Size([1, 2]),
    "empty torch.Size": lambda: torch.Size([]),
    "SimpleNamespace": lambda: types.SimpleNamespace(a=1.0),
    "unset field": Unset,
    "dataclass": lambda: filled(None),
    "dataclass class": lambda: Unset,
    "cyclic list": cyclic_list,
    "cyclic dict": cyclic_dict,
    "cyclic dataclass": cyclic_dataclass,
    "deep list": lambda: deep(lambda value: [value]),
    "deep tuple": lambda: deep(lambda value: (value,)),
    "deep dict": lambda: deep(lambda value: {"a": value}),
    "deep OrderedDict": lambda: deep(lambda value: collections.OrderedDict(a=value)),
    "deep dataclass": lambda: deep(filled),
    "packed sequence": lambda: pack_sequence([torch.ones(2), torch.ones(1)]),
}

ARRAYS: dict[str, Callable[[], Any]] = {
    "np.int64": lambda: np.int64(0),
    "np.uint8": lambda: np.uint8(100),
    "np.bool": lambda: np.True_,
    "np.float32": lambda: np.float32(1.5),
    "np.float64": lambda: np.float64(1.5),
    "np.longdouble": lambda: np.longdouble(1.5),
    "np.complex64": lambda: np.complex64(1j),
    "np.str": lambda: np.str_("sum"),
    "np.datetime64": lambda: np.datetime64("2026-01-01"),
    "0-d array": lambda: np.array(0),
    "0-d bool array": lambda: np.array(True),
    "array": lambda: np.ones(3),
    "array of ints": lambda: np.arange(2),
    "array of bools": lambda: np.array([True, False]),
    "array of halves": lambda: np.ones(3, dtype=np.float16),
    "array of uint64": lambda: np.ones(3, dtype=np.uint64),
    "array of long doubles": lambda: np.ones(3, dtype=np.longdouble),
    "array of complex": lambda: np.ones(3, dtype=np.complex64),
    "array of objects": lambda: np.array([None, "a"], dtype=object),
    "array of strings": lambda: np.array(["a", "b"]),
    "array of dates": lambda: np.array(["2026-01-01"], dtype="datetime64[D]"),
    "structured array": lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
    "recarray": lambda: np.zeros(2, dtype=[("a", "f4")]).view(np.recarray),
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], mask=[True, False]),
    "matrix": lambda: np.asmatrix(np.eye(2)),
    "big-endian array": lambda: np.ones(3, dtype=">f4"),
    "reversed array": lambda: np.arange(4.0)[::-1],
    "transposed array": lambda: np.arange(6.0).reshape(2, 3).T,
    "read-only array": lambda: np.broadcast_to(np.float32(1), (2, 3)),
    "empty array": lambda: np.zeros((0, 3)),
    "list of an array": lambda: [np.ones(3)],
    "dict of arrays": lambda: {"a": np.ones(3), "b": np.float32(2), "c": torch.ones(1)},
    "dict of numpy keys": lambda: {np.int64(1): 1.0},
}

KINDS = {**PLAIN, **CONTAINERS, **ARRAYS, **TENSORS, **MODULES}


def made_of(kind: str) -> Any:
    """Return a value of a kind, with tensors on the default device if a device of that type can have them."""
    try:
        with _making:
            return KINDS[kind]()
    except (RuntimeError, AttributeError):
        if torch.empty(()).is_cpu:
            raise
        with torch.device("cpu"):
            return KINDS[kind]()
