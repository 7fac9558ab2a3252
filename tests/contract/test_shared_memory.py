"""Reductions of large CPU tensors through memory that the ranks of a host share: results, and failures."""

from __future__ import annotations

import errno
import os
import random
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.data.shared_memory_plane import SharedMemoryPlane
from rankwise._comm.data.staging import Staging
from rankwise._comm.reduce_ops import Op, plan
from tests.comm.members import in_threads
from tests.lanes import variants

pytestmark = pytest.mark.ranks(2, 3, 4)

# Reduced by all ranks, or each by one; with a last chunk that is shorter.
LENGTHS = [1_500, 70_001, 1_000_003, 5_000_011]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def values(length: int, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Return the tensors of all ranks, the same on each."""
    generator = torch.Generator().manual_seed(length)
    return [(torch.rand(length, generator=generator) * 5).to(dtype) for _ in range(size)]


def folded(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction in the order of ranks, one after the other."""
    parsed = Op.parse(op)
    recipe = plan(tensors[0].dtype, parsed)
    total, *others = (recipe.start(tensor) for tensor in tensors)
    for wire in others:
        total = parsed.combine(total, wire)
    return recipe.finish(total, len(tensors)).reshape(tensors[0].shape)


@pytest.fixture
def plane(session: rw.Session) -> SharedMemoryPlane:
    """The data plane of the session."""
    rw.barrier()  # the ranks are connected after it
    found = comm_of(None).planes.shared_memory
    assert found is not None
    return found


@pytest.mark.slow_with_ranks(4)  # two have no order
@pytest.mark.parametrize("length", variants(LENGTHS, fast={70_001, 1_000_003}, slow={1_500}))
@pytest.mark.parametrize(
    "dtype", variants(DTYPES, fast={torch.float32, torch.bfloat16, torch.bool}, slow={torch.int64, torch.complex64})
)
def test_reductions_are_folds_in_the_order_of_ranks(
    plane: SharedMemoryPlane, session: rw.Session, length: int, dtype: torch.dtype
) -> None:
    tensors = values(length, dtype, session.world_size)
    for op in ("sum", "mean", "product", "max"):
        if dtype.is_complex and op == "max":
            continue
        wanted = folded(tensors, op)
        assert torch.equal(rw.all_reduce(tensors[session.rank], op), wanted)
        if wanted.dtype == dtype:
            own = tensors[session.rank].clone()
            assert rw.all_reduce_(own, op) is own
            assert torch.equal(own, wanted)
        pieces = [tensor.chunk(session.world_size)[0] for tensor in tensors]
        got = rw.reduce_scatter([pieces[session.rank]] * session.world_size, op)
        assert torch.equal(got, folded(pieces, op))
    assert torch.equal(rw.all_gather_cat(tensors[session.rank]), torch.cat(tensors))
    assert plane.is_available


def test_tensors_of_unusual_forms(plane: SharedMemoryPlane, session: rw.Session) -> None:
    size, whole = session.world_size, torch.arange(400_000.0).view(400, 1000)
    for tensor in (whole.t(), whole[:, ::2], whole.requires_grad_()[::3], torch.ones(()), torch.ones(0, 3)):
        got = rw.all_reduce(tensor)
        assert torch.equal(got, tensor.detach() * size)
        assert not got.requires_grad
    part = torch.zeros(1000, 300)
    rw.all_reduce_(part[:, ::2].add_(1))
    assert part.sum() == size * 150_000
    mixed = {"a": torch.ones(90_000), "b": torch.ones(90_000, dtype=torch.int32), "c": [torch.ones(3).double()] * 2}
    reduced: Any = rw.all_reduce(mixed)
    assert all((leaf == size).all() for leaf in (reduced["a"], reduced["b"], reduced["c"][0], reduced["c"][1]))


@pytest.mark.soak(50)
def test_calls_of_random_sizes_follow_each_other(plane: SharedMemoryPlane, session: rw.Session, seed: int) -> None:
    """So do steps of one operation and of the next, in the same rows."""
    draw = random.Random(seed)  # noqa: S311 - the same on all ranks
    total = sum(range(1, session.world_size + 1))
    for number in range(60):
        tensor = torch.full(
            (draw.choice([2_000, 100_000, 300_000, 3_000_000]),), float((session.rank + 1) * (number + 1))
        )
        if draw.random() < 0.3:
            assert (rw.all_gather_cat(tensor[:9_000]).view(session.world_size, -1).sum(0) == total * (number + 1)).all()
        elif draw.random() < 0.3:
            works = [rw.all_reduce(tensor, async_op=True) for _ in range(3)]
            assert all((work.wait() == total * (number + 1)).all() for work in works)
        else:
            assert (rw.all_reduce_(tensor) == total * (number + 1)).all()


def test_groups_of_two_threads_at_the_same_time(plane: SharedMemoryPlane, session: rw.Session) -> None:
    groups = [rw.new_group(range(session.world_size)) for _ in range(2)]

    def reduce(index: int) -> bool:
        sums = [rw.all_reduce(torch.full((400_000,), float(index + turn)), group=groups[index]) for turn in range(20)]
        wanted = [session.world_size * (index + turn) for turn in range(20)]
        return all((one == value).all() for one, value in zip(sums, wanted, strict=True))

    assert in_threads(reduce, 2) == [True, True]
    for group in groups:
        group.close()


def test_the_memory_of_a_group_is_freed_with_it(plane: SharedMemoryPlane, session: rw.Session) -> None:
    page = plane._control.shared_page.page  # type: ignore[union-attr]  # it is available

    def blocks() -> int:
        rw.barrier()
        return os.fstat(page._memory.descriptor).st_blocks

    before = blocks()
    for _ in range(3):
        with rw.new_group(range(session.world_size)) as group:
            rw.all_reduce_(torch.ones(4_000_000), group=group)
            assert blocks() > before + 1000
        assert blocks() < before + 200


def test_a_rank_without_memory_is_an_error_on_all(
    plane: SharedMemoryPlane, session: rw.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory here")

    with rw.new_group(range(session.world_size)) as group:
        with monkeypatch.context() as patched:
            if session.rank == 1:
                patched.setattr(os, "posix_fallocate", no_memory)
            with pytest.raises(rw.CollectiveError if session.rank == 1 else rw.RemoteRankError, match="no memory here"):
                rw.all_reduce(torch.ones(100_000), group=group)
            assert rw.all_reduce(1, group=group) == session.world_size
        assert (rw.all_reduce(torch.ones(100_000), group=group) == session.world_size).all()


def test_after_a_call_that_differs_the_next_one_works(plane: SharedMemoryPlane, session: rw.Session) -> None:
    for length in (100_000, 2_000_000):
        with pytest.raises(rw.MismatchError):
            rw.all_reduce_(torch.ones(length + (session.rank == 0)))
        assert (rw.all_reduce_(torch.ones(length)) == session.world_size).all()
        error = rw.PayloadTypeError if session.rank == 0 else rw.RemoteRankError
        with pytest.raises(error):
            rw.all_reduce_(torch.ones(length) if session.rank else torch.ones(length).to_sparse())
        assert (rw.all_reduce_(torch.ones(length)) == session.world_size).all()


def test_rows_of_another_step_are_noticed(plane: SharedMemoryPlane, session: rw.Session) -> None:
    group = rw.new_group(range(session.world_size))
    rw.all_reduce(torch.ones(5_000), group=group)
    rw.barrier(group=group)  # all have read the rows
    own: Staging = comm_of(group).planes.shared_memory._staging  # type: ignore[union-attr, assignment]
    own.step += session.rank == 1
    with pytest.raises(rw.CollectiveError, match="in different steps"):
        rw.all_reduce(torch.ones(5_000), group=group)
    with pytest.raises(rw.CollectiveError):
        rw.all_reduce(1, group=group)


@pytest.mark.parametrize(
    "dtype",
    variants([torch.float32, torch.bfloat16, torch.bool, torch.complex128], fast={torch.bfloat16}),
)
def test_parts_of_different_lengths_are_gathered(
    plane: SharedMemoryPlane, session: rw.Session, dtype: torch.dtype
) -> None:
    size = session.world_size
    for length in (5_003, 1_000_003):
        whole = values(size * (length + size), dtype, 1)[0]
        # The first parts are the longest ones, that of rank 0 or of the last rank is empty, or so short that it travels
        # in a frame, or all are of one length.
        for lengths in (
            [length + size - rank for rank in range(size)],
            [0, *[length] * (size - 1)],
            [*[length] * (size - 1), 0],
            [7, *[length] * (size - 1)],
            [length] * size,
        ):
            wanted = whole[: sum(lengths)]
            part = wanted.split(lengths)[session.rank]
            got = rw.all_gather_cat(part)
            assert torch.equal(got, wanted)
            assert got.is_contiguous()
            assert got.untyped_storage().nbytes() == got.nbytes
            assert not got._is_view()
            for other, wanted_part in zip(rw.all_gather(part), wanted.split(lengths), strict=True):
                assert torch.equal(other, wanted_part)
                assert other.untyped_storage().nbytes() == other.nbytes
            got.zero_()
            assert torch.equal(part, whole[: sum(lengths)].split(lengths)[session.rank])


def test_parts_of_other_forms_are_concatenated(plane: SharedMemoryPlane, session: rw.Session) -> None:
    rank, size = session.rank, session.world_size
    whole = torch.arange(60_000.0 * size).view(1, size * 20, 3_000)
    parts = list(whole.split([20 + (rank == 0) - (rank == 1) for rank in range(size)], dim=1))
    assert torch.equal(rw.all_gather_cat(parts[rank], dim=1), whole)
    # One rank has another order of dimensions in memory.
    other = parts[rank].transpose(1, 2).contiguous().transpose(1, 2) if rank == 1 else parts[rank]
    assert torch.equal(rw.all_gather_cat(other, dim=-2), whole)
    columns = whole[0].chunk(size, dim=1)
    assert torch.equal(rw.all_gather_cat(columns[rank], dim=1), whole[0])
    images = torch.rand(2, 3, 40, 50, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    got = rw.all_gather_cat(images)
    assert torch.equal(got, torch.cat([images] * size))
    assert got.is_contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        assert torch.equal(rw.all_gather_cat(parts[rank], dim=1), whole)
    leaf = rw.all_gather_cat(parts[rank], dim=1).requires_grad_()
    (leaf * 2).sum().backward()
    assert leaf.grad is not None
    assert rw.all_gather_cat(parts[rank], dim=1, async_op=True).wait().add_(1).sum() == (whole + 1).sum()
