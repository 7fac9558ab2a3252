"""Large values through files in memory: what receivers do with them, and what happens where a rank cannot use files."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise._collectives import memory_room, scatter
from rankwise._comm import shared_memory as files
from rankwise._comm.group import Group
from rankwise._memory import require_available
from tests.lanes import variants

pytestmark = pytest.mark.ranks(2, 3)

LENGTH = 300_000
NBYTES = 4 * LENGTH
Call = Callable[[Any], Any]

# With a value of each rank; they return a list of those that this rank receives.
CALLS: dict[str, Call] = {
    "all_gather": rw.all_gather,
    "gather": lambda value: rw.gather(value, dst=1) or [],
    "broadcast": lambda value: [rw.broadcast(value, src=1)],
    "scatter": lambda value: [rw.scatter([value] * rw.get_world_size(), src=1)],
    "all_gather, async_op": lambda value: rw.all_gather(value, async_op=True).wait(),
}


@pytest.fixture(autouse=True)
def _nothing_is_mapped() -> None:
    """Free what errors of other tests have: they are in cycles."""
    gc.collect()


def large(rank: int) -> torch.Tensor:
    return torch.full((LENGTH,), float(rank))


def senders(name: str) -> list[int]:
    """Return the ranks whose values this one receives."""
    if name == "gather" and rw.get_rank() != 1:
        return []
    return list(range(rw.get_world_size())) if "gather" in name else [1]


def check(name: str) -> list[torch.Tensor]:
    """Make a call, and check and return what this rank receives."""
    received = CALLS[name](large(rw.get_rank()))
    assert [one[0].item() for one in received] == senders(name)
    assert all(torch.equal(one, large(int(one[0]))) for one in received)
    return list(received)


def are_of_all(received: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, large(src)) for src, one in enumerate(received))


def num_mapped() -> int:
    """Return how many values this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:rankwise: a value")


def num_open() -> int:
    """Return how many files of values this process has open."""
    links = Path("/proc/self/fd").iterdir()
    return sum("rankwise: a value" in str(link.readlink()) for link in links if link.is_symlink())


@pytest.mark.parametrize("name", variants(CALLS, fast={"all_gather", "broadcast"}))
def test_a_result_is_the_receivers_own(comm: Group, name: str) -> None:
    rank = rw.get_rank()
    own = large(rank)
    received = CALLS[name](own)
    assert num_mapped() == len(received)
    for one in received:
        one.add_(100 * (rank + 1))
    rw.barrier()
    assert [one.unique().item() for one in received] == [src + 100 * (rank + 1) for src in senders(name)]
    assert torch.equal(own, large(rank)), "the value that was sent is not changed either"
    rw.barrier()


def test_memory_is_freed_with_the_last_reference(comm: Group) -> None:
    """At once: not when garbage is collected. And torch keeps no sparse tensor for its next torch.load."""
    sparse = large(0).to_sparse()
    arrays = [large(0), np.ones(LENGTH), np.broadcast_to(np.ones(LENGTH), (2, LENGTH))]
    values = (large(0), "x" * NBYTES, arrays, {"a": bytearray(NBYTES)}, sparse)
    gc.collect()
    gc.disable()
    try:
        for name, call in CALLS.items():
            for value in values:
                received = call(value)
                del received
                assert num_mapped() == 0, (name, type(value))
        whole = [array for _, array in rw.all_gather((np.ones(1000), np.ones(LENGTH)))]
        part = whole[0][5:7]
        del whole
        assert num_mapped() == 1
        assert part.tolist() == [1, 1]
        del part
        assert num_mapped() == 0
    finally:
        gc.enable()


def test_small_values_are_not_mapped(comm: Group) -> None:
    """A process may have 65,530 maps, and a program may keep the results of all its steps."""
    kept = [rw.all_gather(torch.ones(20_000)) for _ in range(5)]
    assert num_mapped() == 0
    assert all(one.sum() == 20_000 for step in kept for one in step)


def test_large_and_small_values_in_one_call(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    lengths = [0, 3, 5_000, LENGTH]
    for turn in range(len(lengths)):
        values: list[dict[str, Any]] = [
            {"t": torch.ones(lengths[(turn + src) % 4]), "s": "x" * src} for src in range(size)
        ]
        for received in (rw.all_gather(values[rank]), rw.gather(values[rank], dst=turn % size)):
            for found, wanted in zip(received or values, values, strict=True):
                assert torch.equal(found["t"], wanted["t"])
                assert found["s"] == wanted["s"]
        src = turn % size
        mine = rw.scatter(values if rank == src else None, src=src)
        assert torch.equal(mine["t"], values[rank]["t"])


def test_forked_children_read_and_write_results(comm: Group) -> None:
    rank = rw.get_rank()
    received = rw.all_gather(large(rank))
    child = os.fork()
    if child == 0:
        is_right = are_of_all(received)
        received[0].zero_().add_(7)
        del received
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert are_of_all(received), "what the child has written is its own"


class Fails:
    """A value that cannot be pickled, or not be unpickled, on one rank."""

    def __init__(self, where: str, rank: int) -> None:
        self.arguments = (where, rank, large(0))

    def __reduce__(self) -> tuple[Any, ...]:
        fail_at("pickle", *self.arguments)
        return fail_at, ("unpickle", *self.arguments)


def fail_at(what: str, where: str, rank: int, data: torch.Tensor) -> torch.Tensor:
    if what == where and rw.get_rank() == rank:
        raise ValueError(f"no {where} here")
    return data


@pytest.mark.parametrize("where", ["pickle", "unpickle"])
@pytest.mark.parametrize("name", variants(CALLS, fast={"all_gather", "broadcast"}))
def test_a_value_that_fails_on_one_rank_is_an_error_on_all(comm: Group, name: str, where: str) -> None:
    for odd in range(comm.size) if where == "unpickle" and name != "gather" else [1]:
        error = rw.PayloadTypeError if rw.get_rank() == odd else rw.RemoteRankError
        with pytest.raises(error, match=rf"no {where} here") as raised:
            CALLS[name](Fails(where, odd))
        assert rw.get_rank() == odd or re.match(rf"rank {odd} on \S+ raised ", str(raised.value))
        check(name)


def test_no_descriptor_is_left(comm: Group) -> None:
    for turn in range(10):
        for name, call in CALLS.items():
            check(name)
            with pytest.raises((rw.PayloadTypeError, rw.RemoteRankError)):
                call(Fails("unpickle" if turn % 2 else "pickle", 1))
            with pytest.raises(rw.MismatchError):
                rw.all_gather(large(0)) if rw.get_rank() else rw.gather(large(0))
    assert num_open() == 0
    gc.collect()  # errors are in cycles
    assert num_mapped() == 0


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    """Set a limit of this process, in a block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def no_descriptors() -> Iterator[None]:
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    with limited(resource.RLIMIT_NOFILE, free):
        yield


@contextmanager
def no_address_space() -> Iterator[None]:
    """Leave too little for a value, in a block."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with limited(resource.RLIMIT_AS, pages * resource.getpagesize() + NBYTES // 2):
        yield


@contextmanager
def patched(name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, name, value)
        yield


@contextmanager
def failing(function: str, number: int) -> Iterator[None]:
    """Let a function of `os` fail, in a block."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, function, fail)
        yield


# What one rank lacks, so that the others get its values in another way, or it theirs.
OBSTACLES: dict[str, Callable[[], Any]] = {
    "no descriptors": no_descriptors,
    "no large files": lambda: limited(resource.RLIMIT_FSIZE, 100_000),
    "no memfd_create": lambda: patched("_CREATE", None),
    "no access to /proc": lambda: failing("open", errno.EACCES),
    "no /proc": lambda: failing("open", errno.ENOENT),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_rank_that_cannot_use_files_gets_and_sends_values(comm: Group, obstacle: str) -> None:
    with patched("_CREATE", None):
        for name in CALLS:
            check(name)  # opens all connections
    for odd in (0, 1):
        for name in CALLS:
            with OBSTACLES[obstacle]() if rw.get_rank() == odd else nullcontext():
                received = check(name)
            assert rw.get_rank() != odd or name != "all_gather" or num_mapped() == 0
            del received
    received = check("all_gather")
    assert num_mapped() == comm.size
    del received
    rw.barrier()


@pytest.mark.parametrize("name", variants(CALLS, fast={"all_gather", "broadcast"}))
def test_a_rank_without_memory_is_an_error_on_all(comm: Group, name: str) -> None:
    check(name)
    obstacles: list[Callable[[], Any]] = [
        lambda: failing("writev", errno.ENOMEM),
        lambda: failing("writev", errno.ENOSPC),
    ]
    if "async_op" not in name:  # no thread can be started then
        obstacles.append(no_address_space)
    for obstacle in obstacles:
        fails, value = rw.get_rank() == 1, large(rw.get_rank())
        error = MemoryError if fails else rw.RemoteRankError
        with (
            pytest.raises(error, match="there is no memory for 1200") as raised,
            obstacle() if fails else nullcontext(),
        ):
            CALLS[name](value)
        assert fails or re.match(r"rank 1 on \S+ raised MemoryError: ", str(raised.value))
        del raised
        check(name)
    gc.collect()  # errors are in cycles
    assert (num_open(), num_mapped()) == (0, 0)


@pytest.mark.parametrize("name", variants(CALLS, fast={"all_gather", "broadcast"}))
def test_values_that_do_not_fit_are_refused_on_all_before_any_is_written(comm: Group, name: str) -> None:
    """One rank sees that its host has less memory than there is in fact."""
    value = torch.ones(3_000_000)
    written: list[int] = []
    writev = os.writev

    def write(descriptor: int, pieces: list[memoryview]) -> int:
        written.append(descriptor)
        return writev(descriptor, pieces)

    error = MemoryError if name != "scatter" or rw.get_rank() == 1 else rw.RemoteRankError
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", write)
        if rw.get_rank() == 1:
            patch.setattr(memory_room, "memory_of_host", lambda: value.nbytes - 1)
            patch.setattr(scatter, "require_available", lambda nbytes: require_available(nbytes << 20))
        with pytest.raises(error, match="bytes of values do not fit into the"):
            CALLS[name](value)
    assert written == []
    check(name)


def test_a_file_is_written_in_any_steps(comm: Group) -> None:
    """The kernel may write less than it is given, and a value may have many pieces, and large ones."""
    rank = rw.get_rank()
    value: list[Any] = [
        np.full(70_000, rank + 1j),
        large(rank),
        torch.full((50, 70), rank, dtype=torch.bfloat16).t(),
        np.empty((0, 3)),
        np.full((), rank + 0.5),
        b"\1" * 20_000,
        *[np.full(400, rank) for _ in range(100)],
    ]
    writev = os.writev

    def write_less(descriptor: int, pieces: list[memoryview]) -> int:
        first = pieces[0]
        return writev(descriptor, [first.cast("B")[:9_999] if first.nbytes else first, *pieces[1:3]])

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(os, "writev", write_less)
        else:
            patch.setattr(files, "_MAX_BYTES", 50_000)
            patch.setattr(files, "_MAX_PIECES", 7)
        received = rw.all_gather(value)
        assert num_mapped() == comm.size
    for src, one in enumerate(received):
        assert torch.equal(one[1], large(src))
        assert torch.equal(one[2], torch.full((70, 50), src, dtype=torch.bfloat16))
        assert one[5] == value[5]
        for place in (0, 3, 4, *range(6, 106)):
            wanted = np.asarray(value[place]) + (src - rank)
            assert (one[place].shape, one[place].dtype) == (wanted.shape, wanted.dtype)
            assert (one[place] == wanted).all()


def peak_memory() -> int:
    """Return the most memory that this process has had since the last call, in bytes."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    assert peak is not None
    return int(peak[1]) << 10


def shared_memory() -> int:
    """Return the memory of this process, in bytes, where each page counts as a part for each process that has it."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def test_gather_takes_memory_on_its_destination_only(comm: Group) -> None:
    value = torch.ones(16 << 18)
    check("gather")
    rw.barrier()
    peak_memory()
    before = peak_memory()
    received = rw.gather(value, dst=1)
    assert num_mapped() == (comm.size if rw.get_rank() == 1 else 0)
    if received is None:
        assert peak_memory() - before < value.nbytes // 4
    else:
        assert sum(one.sum().item() for one in received) == comm.size * value.numel()
        assert peak_memory() - before > comm.size * value.nbytes // 2


def test_the_ranks_of_a_host_have_one_copy_of_each_value(comm: Group) -> None:
    value = torch.ones(64 << 18)
    check("all_gather")
    rw.barrier()
    before = shared_memory()
    received = rw.all_gather(value)
    assert sum(one.sum(dtype=torch.float64).item() for one in received) == comm.size * value.numel()
    rw.barrier()
    assert 0.5 * value.nbytes < shared_memory() - before < 1.25 * value.nbytes
    rw.barrier()
