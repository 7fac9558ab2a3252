"""Loops of one length on all ranks: with lengths that are known, and without; failures of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import rankwise as rw
from rankwise.data import GlobalBatches, in_step
from tests.data_loading.datasets import Noise, Numbers

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("session", "torch_random")]


class Lines(IterableDataset[int]):
    """One more line on each rank than on the one before."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(2 + rw.get_rank()))

    def __len__(self) -> int:  # which is wrong
        return 100


def test_all_ranks_make_the_same_number_of_steps() -> None:
    rank, last = rw.get_rank(), rw.get_world_size() - 1
    own = list(range(2 + rank))
    loaders: list[Iterable[Any]] = [
        own,
        iter(own),
        DataLoader(Numbers(2 + rank), batch_size=None),
        DataLoader(Lines(), batch_size=None),
    ]
    for loader in loaders:
        steps = [(int(one), rw.all_reduce(1)) for one in in_step(loader)]
        assert steps == [(0, last + 1), (1, last + 1)]
    for loader in (own, iter(own), DataLoader(Lines(), batch_size=None)):
        found = [None if one is None else int(one) for one in in_step(loader, mode="longest")]
        assert found == own + [None] * (last - rank)
    assert [*in_step([1, 2] if rank == 0 else [], mode="longest")] == ([1, 2] if rank == 0 else [None, None])
    assert [*in_step([])] == [*in_step(iter([]), mode="longest")] == []


def test_global_batches_count_in_every_mode() -> None:
    """10 samples in batches of 4 or 3: the last has 2 samples, or 1."""
    size = rw.get_world_size()
    for batch_size, rest in ((4, 2), (3, 1)):
        for mode in ("shortest", "longest"):
            sampler = GlobalBatches(10, batch_size)
            loader = DataLoader(Numbers(10), batch_sampler=sampler, num_workers=0)
            is_left_out = mode == "shortest" and size > rest
            for epoch in range(3):
                seen = [len(batch) if batch is not None else 0 for batch in in_step(loader, mode=mode)]
                assert len(seen) == -(-10 // batch_size) - is_left_out
                assert rw.all_reduce(sum(seen)) == 10 - rest * is_left_out
                assert sampler.state_dict()["position"] == 10 * (epoch + 1)
                assert sampler.epoch == epoch + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_is_left_at_any_step_goes_on_there(workers: int) -> None:
    """Also before the last batch, of which some ranks have no part."""
    for stop in range(1, 5):
        sampler = GlobalBatches(10, 3)
        loader = DataLoader(Numbers(10), batch_sampler=sampler, num_workers=workers)
        seen: list[int] = []
        for step, batch in enumerate(in_step(loader, mode="longest"), 1):
            seen += [] if batch is None else batch.tolist()
            if step == stop:
                break
        assert sampler.state_dict()["position"] == min(3 * stop, 10)
        if stop < 4:
            seen += [i for batch in in_step(loader, mode="longest") if batch is not None for i in batch.tolist()]
        assert sorted(i for part in rw.all_gather(seen) for i in part) == list(range(10))
        assert sampler.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loop_draws_the_numbers_of_one_that_was_not_left(workers: int) -> None:
    """For each step those of the rank after it, as for dropout; without workers the dataset draws from them too."""
    rw.seed(7)
    sampler = GlobalBatches(12, 3)
    loader = DataLoader(Noise(12), batch_sampler=sampler, num_workers=workers)
    whole, states = [], []
    for _ in range(2):
        for noise in in_step(loader):
            states.append((sampler.state_dict(), rw.random_state()))
            whole.append((noise.tolist() if workers == 0 else [], torch.rand(1).item()))
    for step in (2, 4):  # in an epoch, and where one begins
        sampler = GlobalBatches(12, 3)
        sampler.load_state_dict(states[step - 1][0])
        rw.seed(8)
        rw.set_random_state(states[step - 1][1])
        torch.rand(1)  # that after the saved step
        resumed = [
            (noise.tolist() if workers == 0 else [], torch.rand(1).item())
            for _ in range(sampler.epoch, 2)
            for noise in in_step(DataLoader(Noise(12), batch_sampler=sampler, num_workers=workers))
        ]
        assert resumed == whole[step:]


def test_workers_draw_others_in_each_epoch_on_each_rank_and_with_another_seed() -> None:
    """And the same ones again after a resume where an epoch begins."""
    drawn: list[float] = []
    for seed in (1, 2):
        rw.seed(seed)
        loader = DataLoader(Noise(6), batch_sampler=GlobalBatches(6, 3), num_workers=1)
        drawn += [value for _ in range(2) for noise in in_step(loader) for value in noise.tolist()]
    everywhere = [value for part in rw.all_gather(drawn) for value in part]
    assert len(everywhere) == len(set(everywhere)) == 24
    rw.seed(2)
    sampler = GlobalBatches(6, 3)
    sampler.load_state_dict({"position": 6, "length": 6, "seed": 0})
    again = [
        value
        for noise in in_step(DataLoader(Noise(6), batch_sampler=sampler, num_workers=1))
        for value in noise.tolist()
    ]
    assert again == drawn[-len(again) :]


@pytest.mark.ranks(2)
def test_what_one_rank_passes_is_an_error_on_all() -> None:
    first = rw.get_rank() == 0
    wrong: Any = 3 if first else [1]
    with pytest.raises((rw.InvalidArgumentError, rw.RemoteRankError), match="DataLoader or another iterable, got 3"):
        next(in_step(wrong))
    with pytest.raises(
        (rw.InvalidArgumentError, rw.RemoteRankError), match="mode='all' is not one of shortest, longest"
    ):
        next(in_step([1], mode="all" if first else "longest"))
    with pytest.raises(rw.MismatchError, match="mode"):
        next(in_step([1], mode="shortest" if first else "longest"))
    samplers = GlobalBatches(10, 4, seed=3 if first else 4)
    with pytest.raises(rw.MismatchError, match="seed=3"):
        next(in_step(samplers))
    samplers = GlobalBatches(10, 4)
    if first:
        samplers.trained()
    with pytest.raises(rw.MismatchError, match="position 4"):
        next(in_step(samplers))
    assert rw.all_reduce(1) == 2


@pytest.mark.ranks(2)
def test_an_error_of_one_loader_is_an_error_on_all() -> None:
    def lines() -> Iterator[int]:
        yield 0
        if rw.get_rank() == 1:
            raise OSError("cannot read part 1")
        yield 1

    seen = []
    with pytest.raises((OSError, rw.RemoteRankError), match="cannot read part 1"):
        for line in in_step(lines()):
            seen.append(line)  # noqa: PERF402 - what came before the error
    assert seen == [0]
    assert rw.all_reduce(1) == 2


def test_a_loader_that_ends_before_its_length_is_an_error() -> None:
    class Short(list[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    with pytest.raises(rw.CollectiveError, match="has ended after 1 steps on this rank, and its length was 3"):
        list(in_step(Short([1, 2, 3])))


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_the_loop_alone_is_named() -> None:
    steps = in_step(iter(range(5)))
    next(steps)
    with pytest.raises(rw.MismatchError, match="barrier"):
        rw.barrier() if rw.get_rank() else next(steps)
