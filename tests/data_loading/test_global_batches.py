"""The order of samples: each once an epoch, the same global batches for any number of ranks, workers and resumes."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import rankwise as rw
from rankwise._data.permutation import LONGEST, Permutation
from rankwise.data import GlobalBatches, in_step
from tests.data_loading.datasets import Numbers
from tests.lanes import variants
from tests.tables import each_row

SETTINGS = hypothesis.settings(max_examples=60, deadline=None, database=None)
# The first three of the permutations of 10, 10,000, 10**9 and the largest number of samples.
RECORDED = [
    [8, 2, 1],
    [5077, 6181, 4422],
    [391954863, 510592971, 850000249],
    [524756744770410380, 1237044603545167767, 2932767420609943930],
]
ENDINGS: list[dict[str, bool]] = [{}, {"drop_last": True}, {"pad": True}]


def global_batches(samplers: list[GlobalBatches]) -> Iterator[list[int]]:
    """Yield the global batches of an epoch, put together from the parts of all ranks, as ranks count them."""
    size = len(samplers)
    batches = [sampler._batches_of(rank, size) for rank, sampler in enumerate(samplers)]
    while True:
        parts = [next(one, []) for one in batches]
        whole = list(itertools.chain.from_iterable(parts))
        if not whole:
            return
        lengths = sorted(map(len, parts))
        assert lengths[-1] - lengths[0] <= 1
        for sampler in samplers:
            sampler.trained()
        yield whole


def ranks_of(size: int, *args: Any, **settings: Any) -> list[GlobalBatches]:
    return [GlobalBatches(*args, **settings) for _ in range(size)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, dict[str, bool]]:
    """Return a length, a batch size that 16 ranks can divide, and what the end of an epoch is like."""
    batch_size = draw(st.integers(16, 70))
    ending = draw(st.sampled_from(ENDINGS))
    least = batch_size if ending.get("drop_last") else 1
    return draw(st.integers(least, 300) | st.integers(4000, 9000)), batch_size, ending


@given(case=cases(), sizes=st.tuples(st.integers(1, 16), st.integers(1, 16)), seed=st.integers(0, 2**64 - 1))
@SETTINGS
def test_each_sample_comes_once_in_the_same_global_batches(
    case: tuple[int, int, dict[str, bool]], sizes: tuple[int, int], seed: int
) -> None:
    length, batch_size, ending = case
    worlds = [ranks_of(size, length, batch_size, seed=seed, **ending) for size in sizes]
    epochs: list[list[int]] = []
    for epoch in range(3):
        assert {sampler.epoch for world in worlds for sampler in world} == {epoch}
        first, second = ([*global_batches(world)] for world in worlds)
        assert first == second
        samples = [*itertools.chain.from_iterable(first)]
        whole = length // batch_size * batch_size if ending.get("drop_last") else length
        assert len(set(samples)) == whole
        assert min(samples) >= 0
        assert max(samples) < length
        assert len(samples) == (-(-length // batch_size) * batch_size if ending.get("pad") else whole)
        assert {len(batch) for batch in first[:-1]} <= {batch_size}
        epochs.append(samples)
    if length > 50:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != sorted(epochs[0])


@given(case=cases(), sizes=st.tuples(st.integers(1, 16), st.integers(1, 16)), stop=st.integers(0, 40), data=st.data())
@SETTINGS
def test_a_resume_goes_on_at_another_world_size_and_batch_size(
    case: tuple[int, int, dict[str, bool]], sizes: tuple[int, int], stop: int, data: st.DataObject
) -> None:
    length, batch_size, ending = case
    wanted = ranks_of(1, length, batch_size, **ending)
    before = ranks_of(sizes[0], length, batch_size, **ending)
    all_batches = [*global_batches(wanted), *global_batches(wanted)]
    stop = min(stop, len(all_batches) - 1)
    done: list[list[int]] = []
    while len(done) < stop:
        done += itertools.islice(global_batches(before), stop - len(done))
    states = [sampler.state_dict() for sampler in before]
    assert all(state == states[0] for state in states)
    state = pickle.loads(pickle.dumps(states[0]))

    after = ranks_of(sizes[1], length, batch_size, **ending)
    for sampler in after:
        sampler.load_state_dict(state)
    while len(done) < len(all_batches):
        done += global_batches(after)
    assert done == all_batches

    if not ending:  # with another batch size, the rest of the epoch is still there once
        other = ranks_of(sizes[1], length, data.draw(st.integers(16, 70)))
        for sampler in other:
            sampler.load_state_dict(state)
        first = state["position"] % length
        samples = [*itertools.chain.from_iterable(all_batches)][state["position"] :]
        assert [*itertools.chain.from_iterable(global_batches(other))] == samples[: length - first]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.usefixtures("torch_random")
@pytest.mark.parametrize("workers", variants([0, 1, 2, 3, 4], fast=[0, 2], slow=[3]))
def test_any_number_of_workers_gets_the_same_batches(workers: int) -> None:
    """Also where the workers have asked for the whole epoch before the first step."""
    for length in (5, 37):
        sampler = GlobalBatches(length, 4, seed=3)
        wanted = [[*GlobalBatches(length, 4, seed=3)._batches_of(0, 1)]]
        loader = DataLoader(Numbers(length), batch_sampler=sampler, num_workers=workers, collate_fn=list)
        assert [*loader] == wanted[0]
        with pytest.raises(rw.InvalidArgumentError, match="in_step"):
            sampler.state_dict()
        assert sampler.epoch == 1
        positions = []
        for _ in loader:
            sampler.trained()
            positions.append(sampler.state_dict()["position"])
        assert positions == [*range(length + 4, 2 * length, 4), 2 * length]
        for step, _ in enumerate(in_step(loader)):
            assert sampler.state_dict()["position"] == 2 * length + min(4 * (step + 1), length)
            if step == 0:
                break
        assert sampler.batches_left() == len(loader) - 1
        assert len([*in_step(loader)]) == len(loader) - 1
        assert sampler.state_dict() == {"position": 3 * length, "length": length, "seed": 3}


def test_a_loop_that_nothing_counts_and_that_is_left_begins_the_epoch_again() -> None:
    sampler = GlobalBatches(20, 4)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first
    assert sampler.epoch == 0
    list(sampler)
    assert sampler.epoch == 1
    assert next(iter(sampler)) != first


def test_a_rank_without_a_part_of_the_last_batch_goes_on_with_the_next_epoch() -> None:
    """9 samples in batches of 4 for 4 ranks: the last batch is rank zero's alone."""
    samplers = ranks_of(4, 9, 4)
    for epoch in range(3):
        counts = []
        for rank, sampler in enumerate(samplers):
            assert sampler.epoch == epoch or rank
            batches = [*sampler._batches_of(rank, 4)]
            for _ in batches:
                sampler.trained()
            counts.append(len(batches))
        assert counts == [3, 2, 2, 2]
    assert [GlobalBatches(2, 4)._num_batches(0, rank, 4) for rank in range(4)] == [1, 1, 0, 0]


@each_row(
    "length, batch_size, settings, message",
    [
        (0, 4, {}, "length_or_sampler=0 has 0 samples"),
        (-3, 4, {}, "-3 samples"),
        (2**63, 4, {}, "samples"),
        ([], 4, {}, "0 samples"),
        ("text", 4, {}, "neither a length"),
        (2.5, 4, {}, "neither a length"),
        (True, 4, {}, "neither a length"),
        (None, 4, {}, "neither a length"),
        (iter([1]), 4, {}, "neither a length"),
        (10, 0, {}, "batch_size=0 is below 1"),
        (10, 2.0, {}, "batch_size=2.0"),
        (10, 4, {"seed": -1}, "seed=-1"),
        (10, 4, {"seed": 2**64}, "seed="),
        (10, 4, {"seed": "0"}, "seed='0'"),
        (10, 4, {"shuffle": 1}, "shuffle=1"),
        (10, 4, {"drop_last": True, "pad": True}, "choose one"),
        (3, 4, {"drop_last": True}, "leaves nothing"),
    ],
)
def test_arguments_that_cannot_be(length: Any, batch_size: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(rw.InvalidArgumentError, match=message):
        GlobalBatches(length, batch_size, **settings)


@each_row(
    "state, message",
    [
        ({}, "position, length, seed"),
        (None, "position, length, seed"),
        ({"position": 3, "length": 11, "seed": 0}, "11 samples, this one has 10"),
        ({"position": 3, "length": 10, "seed": 1}, "pass seed=1"),
        ({"position": -3, "length": 10, "seed": 0}, "below 0"),
        ({"position": 3.5, "length": 10, "seed": 0}, "position=3.5"),
    ],
)
def test_states_that_do_not_fit(state: Any, message: str) -> None:
    sampler = GlobalBatches(10, 4)
    with pytest.raises(rw.InvalidArgumentError, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict()["position"] == 0


def test_a_batch_has_a_sample_for_each_rank() -> None:
    with pytest.raises(rw.InvalidArgumentError, match="there are 5 ranks: pass at least 5"):
        next(GlobalBatches(100, 4)._batches_of(0, 5))


def test_the_samples_of_a_sampler_follow_from_seed_and_epoch(torch_random: None) -> None:
    """Whatever the random state of the rank is, and after a resume too; that state stays as it is."""

    class Weighted:
        def __len__(self) -> int:
            return 30

        def __iter__(self) -> Iterator[int]:
            return iter([random.randrange(1000) + int(np.random.randint(1000)) for _ in range(30)])  # noqa: NPY002, S311

    for order in (RandomSampler(range(30)), WeightedRandomSampler([1.0] * 30, 30), Weighted()):
        worlds = []
        for size in (1, 3):
            torch.manual_seed(size)
            samplers = ranks_of(size, order, 7, seed=1)
            state = torch.get_rng_state()
            worlds.append([[*global_batches(samplers)] for _ in range(2)])
            assert torch.equal(torch.get_rng_state(), state)
        assert worlds[0] == worlds[1]
        assert worlds[0][0] != worlds[0][1]
        resumed = GlobalBatches(order, 7, seed=1)
        resumed.load_state_dict({"position": 37, "length": 30, "seed": 1})
        assert [*resumed] == worlds[0][1][1:]
    assert [*GlobalBatches(SequentialSampler(range(5)), 4)] == [[0, 1, 2, 3], [4]]
    assert [*GlobalBatches([("a", 1), ("b", 2)], 4)] == [[("a", 1), ("b", 2)]]


def test_a_sampler_with_another_number_of_samples_is_refused() -> None:
    class Wrong(list[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    with pytest.raises(rw.InvalidArgumentError, match="returned 1 samples, and had 3 before"):
        next(iter(GlobalBatches(Wrong([1, 2, 3]), 2)))


def test_set_epoch_of_a_sampler_is_called() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(20), num_replicas=1, rank=0)
    batches = GlobalBatches(sampler, 20)
    first, second = [*batches], [*batches]
    assert first != second
    sampler.set_epoch(1)
    assert second == [[*sampler]]


@each_row("length", [1, 2, 3, 5, 100, 4096, 4097, 5000, 65_536, 65_537, 100_003])
def test_a_permutation_has_each_number_once(length: int) -> None:
    permutation = Permutation(length, seed=5, epoch=2)
    assert permutation(torch.arange(length)).sort().values.equal(torch.arange(length))


def test_a_permutation_of_any_length_is_on_every_machine_the_same() -> None:
    positions = torch.tensor([0, 1, 2])
    found = [Permutation(length, seed=0, epoch=0)(positions).tolist() for length in (10, 10_000, 10**9, LONGEST)]
    assert found == RECORDED
    for length in (10**9, 1 << 30, (1 << 30) + 1, LONGEST):  # from the second to the third, numbers get 64 bits
        values = Permutation(length, seed=0, epoch=0)(torch.arange(length - 2000, length))
        assert len(values.unique()) == 2000
        assert 0 <= int(values.min()) <= int(values.max()) < length
    with torch.device("meta"):
        assert Permutation(10, seed=0, epoch=0)(positions).tolist() == RECORDED[0]


def test_permutations_look_random() -> None:
    """As many fixed points, and neighbours that stay neighbours, as among all permutations; places that are even."""
    for length, repeats in ((6, 3000), (5000, 200)):
        fixed = neighbours = 0
        first = torch.zeros(5)
        for seed in range(repeats):
            order = Permutation(length, seed=seed, epoch=1)(torch.arange(length))
            fixed += int((order == torch.arange(length)).sum())
            neighbours += int((order[1:] - order[:-1] == 1).sum())
            first[int(order[0]) * 5 // length] += 1
        assert abs(fixed - repeats) < 5 * repeats**0.5
        assert abs(neighbours - repeats * (length - 1) / length) < 5 * repeats**0.5
        even = repeats / 5 if length > 6 else None
        assert even is None or float(((first - even) ** 2 / even).sum()) < 30


def test_it_says_what_it_is() -> None:
    assert repr(GlobalBatches(10, 4, pad=True)) == (
        "GlobalBatches(10, 4, seed=0, shuffle=True, drop_last=False, pad=True; position 0)"
    )
