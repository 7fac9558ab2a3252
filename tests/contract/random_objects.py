"""Random values of many types and of any size, which come back as they are, in containers."""

from __future__ import annotations

import array
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

# Below a frame, above it, and above the size from which values go through files.
LENGTHS = [0, 1, 3, 3_000, 300_000]


def structured(length: int, rank: int) -> Any:
    made = np.zeros(length, [("a", "i4"), ("b", "f8", 2)])
    made["b"] = rank
    return made


def read_only(length: int, rank: int) -> Any:
    made = np.full(length, rank)
    made.flags.writeable = False
    return made


def with_attribute(length: int, rank: int) -> torch.Tensor:
    made = torch.full((length,), rank)
    made.label = f"of rank {rank}"  # type: ignore[attr-defined]
    return made


def sparse(length: int, rank: int) -> torch.Tensor:
    dense = torch.zeros(length, 3)
    dense[::2, 1] = rank + 1
    return dense.to_sparse()


def frame(length: int, rank: int) -> Any:
    import pandas as pd  # noqa: PLC0415 - it may not be installed

    columns = {
        "a": np.arange(length) + rank,
        "b": np.full(length, 0.5),
        "c": [f"{rank} {row}" for row in range(length)],
    }
    return pd.DataFrame(columns, index=np.arange(length) * 2)


# Each returns a value of a rank with about so many elements.
KINDS: dict[str, Callable[[int, int], Any]] = {
    "text": lambda length, rank: "é" * length + str(rank),
    "bytes": lambda length, rank: bytes([rank]) * length,
    "bytearray": lambda length, rank: bytearray([rank]) * length,
    "array.array": lambda length, rank: array.array("d", [rank]) * length,
    "integers": lambda length, rank: list(range(rank, rank + length // 10)),
    "set": lambda length, rank: {(rank, number) for number in range(length // 10)},
    "array": lambda length, rank: np.arange(length) + rank,
    "scalar": lambda _, rank: np.float32(rank),
    "0-d array": lambda _, rank: np.array(rank),
    "bool array": lambda length, rank: np.arange(length) % (rank + 2) == 0,
    "complex array": lambda length, rank: np.full((length, 2), rank + 1j),
    "array of long doubles": lambda length, rank: np.full(length, rank, np.longdouble),
    "Fortran array": lambda length, rank: np.asfortranarray(np.arange(2.0 * length).reshape(length, 2) + rank),
    "strided array": lambda length, rank: (np.arange(2 * length) + rank)[::2],
    "array of dates": lambda length, rank: np.full(length, rank, "datetime64[s]"),
    "array of texts": lambda length, rank: np.array([f"{rank}"] * length),
    "array of objects": lambda length, rank: np.array([None, rank] * (length // 10), dtype=object),
    "array of other bytes": lambda length, rank: np.full(length, rank, ">i4"),
    "structured array": structured,
    "read-only array": read_only,
    "tensor": lambda length, rank: torch.arange(length) + rank,
    "0-d tensor": lambda _, rank: torch.tensor(rank),
    "empty tensor": lambda length, _: torch.empty(length, 0),
    "transposed tensor": lambda length, rank: (torch.arange(2.0 * length).view(length, 2) + rank).t(),
    "channels last": lambda length, rank: torch.full((1, 3, length // 3 + 1, 2), float(rank)).to(
        memory_format=torch.channels_last
    ),
    "part of a tensor": lambda length, rank: (torch.arange(3 * length) + rank)[length : 2 * length],
    "expanded tensor": lambda length, rank: torch.tensor([rank]).expand(length),
    "bool tensor": lambda length, rank: torch.arange(length) % (rank + 2) == 0,
    "bfloat16 tensor": lambda length, rank: torch.full((length,), rank, dtype=torch.bfloat16),
    "float8 tensor": lambda length, rank: torch.full((length,), float(rank)).to(torch.float8_e4m3fn),
    "complex tensor": lambda length, rank: torch.full((length,), rank + 1j).conj(),
    "tensor with gradients": lambda length, rank: torch.full((length,), float(rank), requires_grad=True),
    "parameter": lambda length, rank: torch.nn.Parameter(torch.full((length,), float(rank))),
    "sparse tensor": sparse,
    "tensor with an attribute": with_attribute,
    **({"DataFrame": frame} if importlib.util.find_spec("pandas") else {}),
}

leaves = st.tuples(st.just("leaf"), st.sampled_from(sorted(KINDS)), st.sampled_from(LENGTHS))
templates = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", 1]), children, max_size=3),
        children.map(lambda child: ("twice", child)),
    ),
    max_leaves=4,
)


def made(template: Any, rank: int) -> Any:
    """Return the value of a rank for a template."""
    if isinstance(template, dict):
        return {key: made(value, rank) for key, value in template.items()}
    if isinstance(template, list):
        return [made(item, rank) for item in template]
    if template[0] == "twice":
        one = made(template[1], rank)
        return (one, one)
    _, kind, length = template
    return KINDS[kind](length, rank)


def same(found: Any, wanted: Any) -> bool:
    """Return whether a value is like another, with its types; in pairs of one object, whether they are that too."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, tuple):
        return found[0] is found[1] and same(found[0], wanted[0])
    return _same_leaf(found, wanted)


def _same_leaf(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, np.ndarray):
        return _same_array(found, wanted)
    if isinstance(wanted, torch.Tensor):
        return _same_tensor(found, wanted)
    return bool(found.equals(wanted) if hasattr(wanted, "equals") else found == wanted)


def _same_array(found: Any, wanted: Any) -> bool:
    is_writeable = wanted.flags.writeable == found.flags.writeable or wanted.dtype == object
    is_fortran = wanted.copy(order="K").flags.f_contiguous
    layout = (found.dtype, found.shape, found.flags.f_contiguous) == (wanted.dtype, wanted.shape, is_fortran)
    return is_writeable and layout and np.array_equal(found, wanted)


def _same_tensor(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    kind = (wanted.dtype, wanted.layout, wanted.requires_grad, vars(wanted))
    if (found.dtype, found.layout, found.requires_grad, vars(found)) != kind:
        return False
    if wanted.layout is torch.sparse_coo:
        return torch.equal(found.to_dense(), wanted.to_dense())
    clone = wanted.detach().clone().resolve_conj()
    # The stride of a dimension of size 1, and those of a tensor without elements, mean nothing.
    dims = [dim for dim, size in enumerate(wanted.shape) if size > 1] if wanted.numel() else []
    has_strides = [found.stride(dim) for dim in dims] == [clone.stride(dim) for dim in dims]
    if not has_strides or found.shape != wanted.shape:
        return False
    return torch.equal(found.to(torch.complex64), clone.to(torch.complex64))
