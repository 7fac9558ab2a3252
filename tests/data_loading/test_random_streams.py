"""Seeds, the streams of ranks, and the state of random numbers."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    """Give the random state back."""
    state = rw.random_state()
    yield
    rw.set_random_state(state)


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()  # noqa: NPY002, S311


@pytest.mark.ranks("serial", 1, 2, 3)
@pytest.mark.usefixtures("session")
def test_streams_of_ranks_and_blocks_that_are_the_same() -> None:
    size = rw.get_world_size()
    alone, together = [[rank] for rank in range(size)], [list(range(size))]
    names = ("python", "numpy", "torch")
    rw.seed(3)
    assert {name: rw.random_streams()[name] for name in names} == dict.fromkeys(names, alone)
    before = rw.all_gather(drawn())
    with rw.same_seed(5):
        assert {name: rw.random_streams()[name] for name in names} == dict.fromkeys(names, together)
        same = drawn()
        assert rw.all_gather(same) == [same] * size
    after = rw.all_gather(drawn())
    assert len({*before, *after}) == 2 * size
    rw.seed(3)
    assert (rw.all_gather(drawn()), rw.all_gather(drawn())) == (before, after), "the block changed nothing"
    with pytest.raises(KeyError), rw.same_seed(5):
        assert drawn() == same
        raise KeyError
    rw.seed(3, step=1)
    assert not {*rw.all_gather(drawn())} & {*before}

    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    assert drawn() == same, "as their own functions seed them"


def test_streams_of_many_ranks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the 32 bits that torch's generator takes of a seed: 70,000 random ones would not."""
    seeds: list[int] = []
    monkeypatch.setattr("rankwise._training.random_streams.get_rank", iter(range(200_000)).__next__)
    monkeypatch.setattr("rankwise._training.random_streams._seed_all", seeds.append)
    for _ in range(200_000):
        rw.seed(0)
    assert len({seed % (1 << 32) for seed in seeds}) == len(seeds)


def test_a_state_can_be_saved_and_set() -> None:
    rw.seed(0)
    random.gauss(0, 1)
    file = io.BytesIO()
    torch.save(rw.random_state(), file)
    wanted = drawn()
    file.seek(0)
    rw.set_random_state(torch.load(file))  # with weights_only=True
    assert drawn() == wanted


def test_states_that_are_none() -> None:
    state = rw.random_state()
    wrong: list[tuple[Any, str]] = [
        (None, "generators None, and this process has python, torch, numpy"),
        ({}, "rankwise.seed"),
        (state | {"cuda": []}, "cuda, and this process has"),
        (state | {"torch": 3}, "'torch' of the state"),
        (state | {"torch": torch.zeros(3, dtype=torch.uint8)}, "'torch' of the state"),
        (state | {"python": (1, 2)}, "'python' of the state"),
        (state | {"python": (3, [1], None)}, "'python' of the state"),
        (state | {"numpy": ("MT19937", [1], 0)}, "'numpy' of the state"),
    ]
    for value, message in wrong:
        with pytest.raises(rw.InvalidArgumentError, match=message):
            rw.set_random_state(value)
    for seed in (-1, 2**64, 1.0, None, True, "0"):
        with pytest.raises(rw.InvalidArgumentError, match="seed="):
            rw.seed(seed)  # type: ignore[arg-type]
        with pytest.raises(rw.InvalidArgumentError, match="seed="), rw.same_seed(seed):  # type: ignore[arg-type]
            pass
    with pytest.raises(rw.InvalidArgumentError, match="step=-1"):
        rw.seed(0, step=-1)
    for seed in (2**32 - 1, 2**32, 2**64 - 1):
        rw.seed(seed)
        with rw.same_seed(seed):
            pass
