"""all_reduce_ of one tensor: tensors of different forms on different ranks are reduced by different functions."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group
from tests.contract.tensor_kinds import Tagged

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.slow_with_ranks(3)]

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


@pytest.mark.parametrize("form", [name for name in FORMS if name != "contiguous"])
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


@pytest.mark.parametrize("form", ["transposed", "strided", "parameter"])
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
