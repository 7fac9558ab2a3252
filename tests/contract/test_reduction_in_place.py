"""all_reduce_ of one tensor: tensors of different forms on different ranks are reduced by different functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group
from tests.contract.tensor_kinds import Tagged
from tests.tables import each_row

pytestmark = pytest.mark.ranks(2, 3)

# Small ones travel in frames, those of the other sizes do not; the last one needs several steps in shared memory.
WIDTHS = (1, 100, 23_333, 400_000)


def transposed(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape[::-1], dtype=values.dtype).t().copy_(values)


def strided(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(*values.shape, 2, dtype=values.dtype)[..., 0].copy_(values)


def made_in_inference(values: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return values.clone()


def negative(values: torch.Tensor) -> torch.Tensor:
    """Return a view that is negated when it is read, if there is one of the dtype."""
    is_view = values.dtype is torch.float32
    return torch.complex(values * 0, -values).conj().imag if is_view else transposed(values)


# Tensors with the given values. None but the first is reduced without a request.
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.clone,
    "transposed": transposed,
    "strided": strided,
    "tagged": lambda values: transposed(values).as_subclass(Tagged),
    "inference": made_in_inference,
    "parameter": lambda values: torch.nn.Parameter(transposed(values), requires_grad=values.is_floating_point()),
    "negative": negative,
}


def operands(width: int, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Return the values of all ranks, the same on each."""
    draw = torch.Generator("cpu").manual_seed(width)
    drawn = [torch.rand(3, width, generator=draw, device="cpu") * 4 for _ in range(size)]
    return [values.to(torch.empty(0).device, dtype) for values in drawn]


@each_row("form", [name for name in FORMS if name != "contiguous"], collective=True)
def test_ranks_with_tensors_of_another_form(comm: Group, form: str) -> None:
    is_odd = rw.get_rank() == 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for width in WIDTHS if dtype is torch.float32 else WIDTHS[:-1]:
            values = operands(width, dtype, comm.size)
            for op in ("and", "or") if dtype is torch.bool else ("sum", "mean", "product", "min", "max"):
                if op == "mean" and not dtype.is_floating_point:
                    continue
                # The same reduction without an `all_reduce_` of tensors of two forms.
                wanted = rw.all_reduce(values[rw.get_rank()], op)
                tensor = FORMS["contiguous" if is_odd else form](values[rw.get_rank()])
                assert rw.all_reduce_(tensor, op) is tensor
                assert torch.equal(tensor.detach().as_subclass(torch.Tensor), wanted), (dtype, width, op)


@each_row("form", ["transposed", "strided", "parameter"], collective=True)
def test_another_shape_or_dtype_of_another_form_is_named(comm: Group, form: str) -> None:
    is_odd = rw.get_rank() == 0
    for width in WIDTHS[:-1]:
        values = torch.ones(3, width)
        cases = [
            (torch.ones(3, width + 1), rf"float32\[3, {width}\] on .*float32\[3, {width + 1}\] on "),
            (torch.ones(3 * width), rf"float32\[3, {width}\] on .*float32\[{3 * width}\] on "),
            (values.double(), rf"float32\[3, {width}\] on .*float64\[3, {width}\] on "),
        ]
        for other, message in cases:
            for odd_form, most_form in (("contiguous", form), (form, "contiguous")):
                tensor = FORMS[odd_form](other) if is_odd else FORMS[most_form](values)
                with pytest.raises(rw.MismatchError) as caught:
                    rw.all_reduce_(tensor)
                assert_names(str(caught.value), message)
                assert torch.equal(tensor.detach(), other if is_odd else values)  # nothing was written
        tensor = FORMS["contiguous" if is_odd else form](values)
        with pytest.raises(rw.MismatchError, match=r"op='(sum|max)'.*op='(sum|max)'"):
            rw.all_reduce_(tensor, "max" if is_odd else "sum")
        assert (rw.all_reduce_(tensor) == comm.size).all()


def assert_names(text: str, message: str) -> None:
    """Check that an error names both tensors, in either order."""
    first, second = message.split(".*")
    assert re.search(message, text) or re.search(f"{second}.*{first}", text), text


SHAPES = ((), (3,), (0, 2), (40, 25), (7, 7_000), (2, 300_000))


def tensors_of(dtype: torch.dtype, size: int) -> list[list[torch.Tensor]]:
    """Return the tensors of all ranks, the same on each; of several forms, and more than one step in shared memory."""
    of_ranks: list[list[torch.Tensor]] = []
    for rank in range(size):
        draw = torch.Generator("cpu").manual_seed(rank)
        made = [torch.rand(shape, generator=draw, device="cpu").mul(4).to(dtype) for shape in SHAPES]
        of_ranks.append([*made, made[3].t() * 1, torch.stack([made[3], made[3]])[:, ::2]])
    return of_ranks


@each_row("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.complex64], collective=True)
def test_many_tensors_are_reduced_like_each_of_them(comm: Group, dtype: torch.dtype) -> None:
    of_ranks = tensors_of(dtype, comm.size)
    for count in (3, len(of_ranks[0])):
        for op in ("sum", "mean", "product", "max"):
            if (op == "mean" and not (dtype.is_floating_point or dtype.is_complex)) or (
                op == "max" and dtype.is_complex
            ):
                continue
            wanted = rw.all_reduce(of_ranks[rw.get_rank()][:count], op)
            own = [tensor.clone() for tensor in of_ranks[rw.get_rank()][:count]]
            versions = [tensor._version for tensor in own]
            assert rw.all_reduce_(own, op) is own
            for tensor, expected, version in zip(own, wanted, versions, strict=True):
                assert torch.equal(tensor, expected), (op, tensor.shape)
                assert tensor._version > version, "autograd sees a new version"


def test_containers_and_dtypes_are_mixed(comm: Group) -> None:
    value: dict[str, Any] = {
        "b": [torch.ones(5), torch.ones(70_000, dtype=torch.int32)],
        "a": (torch.ones(3).double(), {"c": torch.nn.Parameter(torch.ones(30_000))}),
    }
    with torch.inference_mode():
        value["i"] = torch.ones(20_000)
    if rw.get_rank() == 0:  # the order of keys does not matter
        value = dict(reversed(value.items()))
    assert rw.all_reduce_(value) is value
    leaves = [*value["b"], value["a"][0], value["a"][1]["c"], value["i"]]
    assert all((leaf == comm.size).all() for leaf in leaves)
    assert rw.all_reduce_([]) == []
    work = rw.all_reduce_([torch.ones(2), torch.ones(50_000)], async_op=True)
    assert all((tensor == comm.size).all() for tensor in work.wait())


def test_memory_that_is_there_twice(comm: Group) -> None:
    for length in (6, 60_000):
        tied = torch.full((length,), rw.get_rank() + 1.0)
        total = comm.size * (comm.size + 1) / 2
        rw.all_reduce_([tied, torch.ones(2), tied, tied.view(2, -1), tied.detach()])
        assert (tied == total).all(), "it is reduced once"
        columns = torch.ones(4, length)
        rw.all_reduce_([columns[:, : length // 2], columns[:, length // 2 :]])
        rw.all_reduce_([columns[:, ::2], columns[:, 1::2], columns[:, 2:2]])
        assert (columns == comm.size**2).all(), "between the elements of the one are those of the other"
        for pair in ([tied, tied[1:]], [tied.view(2, -1), tied[:3]], [columns[:, ::2], columns[:, :3]]):
            with pytest.raises(rw.PayloadTypeError, match=r"tensors \[0\] and \[1\] have a part of their memory"):
                rw.all_reduce_(pair)
        with pytest.raises(rw.MismatchError, match=r"\[1\] is float32.* in the memory of \[0\] on rank 0, float32"):
            rw.all_reduce_([tied, tied] if comm.rank == 0 else [tied, tied.clone()])
        with pytest.raises(rw.PayloadTypeError if comm.rank == 1 else rw.RemoteRankError, match="part of their memory"):
            rw.all_reduce_([tied, tied[1:]] if comm.rank == 1 else [tied, tied[1:].clone()])
        assert (tied == total).all()


@pytest.mark.parametrize("length", [10, 70_000])
def test_nothing_is_written_before_all_agree(comm: Group, length: int) -> None:
    is_odd = comm.rank == 1
    kept = torch.ones(length)
    for other, message in (
        ([kept], r"\[1\] is float32.*, nothing on rank 1|\[1\] is nothing"),
        ([kept, torch.ones(length + 1)], r"\[1\] is float32"),
        ([kept, torch.ones(length, dtype=torch.float64)], r"\[1\] is float"),
        ((kept, torch.ones(length)), "is a (list|tuple) on"),
        ([kept, None], r"got None in \[1\]"),
        ([kept, 3.0], r"got a number in \[1\]"),
        ([kept, torch.ones(1).expand(length)], "expanded"),
        ([kept, torch.ones(length + 2).unfold(0, 3, 1)], "unfolded"),
        ([kept, torch.ones(length, dtype=torch.bool)], "another dtype|is float32"),
    ):
        value: object = other if is_odd else [kept, torch.ones(length)]
        with pytest.raises((rw.MismatchError, rw.PayloadTypeError, rw.RemoteRankError), match=message):
            rw.all_reduce_(value)
        assert (kept == 1).all()
    assert all((tensor == comm.size).all() for tensor in rw.all_reduce_([kept, torch.ones(length)]))
