"""One body for every world: numpy arrays are reduced as tensors, and the results are arrays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group
from tests.tables import each_row

WORLDS = pytest.mark.ranks("serial", 1, 2, 3)


@WORLDS
@each_row("length", [0, 3, 5000], collective=True)
def test_arrays_are_reduced_as_tensors_are(comm: Group, length: int) -> None:
    rank, size = rw.get_rank(), comm.size
    for kind in (np.float16, np.float32, np.float64, np.int8, np.uint16, np.int64, np.complex64, np.bool_):
        array = (np.arange(length) % 2 + rank).astype(kind)
        for op in ("sum", "mean", "product"):
            found = rw.all_reduce(array, op=op)
            wanted = rw.all_reduce(torch.from_numpy(array), op=op).numpy()
            assert type(found) is np.ndarray
            assert found.dtype == wanted.dtype
            assert np.array_equal(found, wanted)
            found[...] = 0  # new, and the caller's
            assert np.array_equal(array, (np.arange(length) % 2 + rank).astype(kind))
    assert rw.all_reduce(np.ones(length)).sum() == length * size


@WORLDS
def test_arrays_in_containers_and_of_unusual_layouts(comm: Group) -> None:
    size = comm.size
    grid = np.arange(6.0).reshape(2, 3)
    value = {
        "array": np.ones(2),
        "tensor": torch.ones(2),
        "inner": [np.full((2, 2), 3), None, 4],
        "no dimensions": np.array(2.5),
        "scalar": np.float32(0.5),
        "transposed": grid.T,
        "reversed": grid[::-1],
        "part": grid[:, 1],
        "read-only": np.broadcast_to(np.float32(1), (2, 3)),
        "big-endian": np.ones(3, dtype=">i4"),
        "field": np.ones(2, dtype=[("a", "i1"), ("b", "<f4")])["b"],
    }
    found: dict[str, Any] = rw.all_reduce(value)
    assert found["array"].tolist() == [size, size]
    assert type(found["tensor"]) is torch.Tensor
    assert found["inner"][0].tolist() == [[3 * size] * 2] * 2
    assert found["inner"][1:] == [None, 4 * size]
    assert type(found["no dimensions"]) is np.ndarray
    assert (found["no dimensions"].shape, found["no dimensions"].item()) == ((), 2.5 * size)
    assert type(found["scalar"]) is float, "numpy's scalars are numbers"
    assert found["scalar"] == 0.5 * size
    assert np.array_equal(found["transposed"], grid.T * size)
    assert np.array_equal(found["reversed"], grid[::-1] * size)
    assert np.array_equal(found["part"], grid[:, 1] * size)
    assert found["read-only"].tolist() == [[size] * 3] * 2
    assert found["big-endian"].dtype == np.dtype("i4")
    assert found["big-endian"].tolist() == [size] * 3
    assert found["field"].tolist() == [size] * 2


@WORLDS
def test_arrays_without_numbers_are_refused(comm: Group) -> None:
    masked: Any = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    for array in (
        np.array(["a"]),
        np.array([None]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.ones(1, dtype=np.longdouble),
        np.zeros(2, dtype=[("a", "f4")]),
        masked,
        np.zeros(2, dtype=[("a", "f4")]).view(np.recarray),
    ):
        with pytest.raises(
            rw.PayloadTypeError, match=r"an array of .* cannot be reduced|more than an array of numbers"
        ):
            rw.all_reduce({"a": array})
        assert rw.all_reduce(1) == comm.size
    with pytest.raises(rw.PayloadTypeError, match="is for bools"):
        rw.all_reduce(np.ones(1), op="and")
    with pytest.raises(rw.PayloadTypeError, match="no tensor in the value"):
        rw.all_reduce(np.ones(1), differentiable=True)


@WORLDS
def test_an_array_against_a_tensor_is_a_mismatch(comm: Group) -> None:
    value: Any = np.ones(2) if rw.get_rank() else torch.ones(2, dtype=torch.float64)
    if comm.size == 1:
        rw.all_reduce(value)
    else:
        with pytest.raises(rw.MismatchError, match=r"an array of float64\[2\] on cpu on rank"):
            rw.all_reduce(value)
    assert rw.all_reduce(1) == comm.size


@WORLDS
def test_arrays_are_scattered_by_rows(comm: Group) -> None:
    rows = np.arange(2 * comm.size).reshape(comm.size, 2)
    values: Any = rows
    found = rw.scatter(values)
    assert np.array_equal(found, rows[rw.get_rank()])


@pytest.mark.slow
def test_numpy_is_not_imported() -> None:
    program = Path(__file__).parent / "programs" / "without_numpy.py"
    done = subprocess.run([sys.executable, program], check=False, capture_output=True, text=True, timeout=200)
    assert done.stdout == "refused\n", done.stderr
