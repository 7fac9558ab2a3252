"""Collectives in functions that `torch.compile` has compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rankwise as rw

SIZES = (3, 4, 5000)


def train() -> tuple[list[torch.Tensor], list[list[float]], int]:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        total = rw.all_reduce(x * 2)
        rw.barrier()
        return total + 1, rw.all_gather(x.sum().item())

    with rw.init(timeout=100.0):
        compiled = torch.compile(step, backend="eager")
        found = [compiled(torch.ones(size)) for size in SIZES]
        model = torch.nn.Linear(3, 1)
        torch.compile(model, backend="eager")(torch.ones(2, 3)).sum().backward()
        rw.sync_grads(model)
        with pytest.raises(rw.MismatchError) as caught:
            torch.compile(lambda x: rw.all_reduce(x) if rw.get_rank() else rw.barrier(), backend="eager")(torch.ones(3))
        return [total for total, _ in found], [sums for _, sums in found], str(caught.value).count(Path(__file__).name)


@pytest.mark.slow
def test_collectives_in_compiled_code_are_those_of_uncompiled_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """For each size of a tensor, also when the compiler makes sizes variable; with the lines of errors."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else parts of torch set it when they are imported
    for totals, sums, lines in rw.launch(train, nproc=2):
        assert all(torch.equal(total, torch.full((size,), 5.0)) for total, size in zip(totals, SIZES, strict=True))
        assert sums == [[size, size] for size in SIZES]
        assert lines == 2
