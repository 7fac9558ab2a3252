"""The arguments of `rankwise.launch`: its own keywords, those of the function, and what it says of mistakes."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from tests.lanes import variants
from tests.tables import each_row


def train(lr: float, momentum: float = 0.9) -> tuple[int, float, float]:
    return rw.get_rank(), lr, momentum


def limited(timeout: float = 1.0) -> float:
    return timeout


def anything(**keywords: Any) -> dict[str, Any]:
    return keywords


def variable(name: str) -> str | None:
    return os.environ.get(name)


def hang() -> None:
    time.sleep(100 * rw.get_rank())


def fail_at_first(folder: str) -> str:
    attempt = Path(folder) / str(rw.get_rank())
    if attempt.exists():
        return "the second time"
    attempt.touch()
    raise OSError("the first time")


def test_keywords_that_launch_does_not_have_are_those_of_the_function() -> None:
    assert rw.launch(train, 0.1, momentum=0.5, nproc=2) == [(0, 0.1, 0.5), (1, 0.1, 0.5)]
    found = rw.launch(anything, lr=0.1, kwargs={"nprocs": 2, "timeout": 3}, timeout=50, nproc=1)
    assert found == [{"lr": 0.1, "nprocs": 2, "timeout": 3}]


@pytest.mark.parametrize("nproc", variants([{}, {"nproc": "auto"}], fast=[{}], slow=[]))
def test_there_is_one_rank_without_an_accelerator(nproc: dict[str, str]) -> None:
    assert rw.launch(rw.get_world_size, **nproc) == [1]  # type: ignore[arg-type]


def test_ranks_have_the_variables_of_the_call() -> None:
    assert rw.launch(variable, "SET_BY_CALL", environ={"SET_BY_CALL": "yes"}, nproc=1) == ["yes"]
    assert "SET_BY_CALL" not in os.environ


def test_ranks_start_again_after_a_failure(tmp_path: Path) -> None:
    assert rw.launch(fail_at_first, str(tmp_path), nproc=1, max_restarts=1) == ["the second time"]


MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "an option that is spelt in another way": (
        lambda: rw.launch(train, 0.1, nprocs=2),
        TypeError,
        (
            "launch() has no argument 'nprocs': did you mean 'nproc'? One of the function with that name goes into "
            "kwargs={'nprocs': ...}"
        ),
    ),
    "also for a function that takes any": (lambda: rw.launch(anything, nprocs=2), TypeError, "did you mean 'nproc'"),
    "an argument that neither has": (
        lambda: rw.launch(train, 0.1, learning_rate=2, nproc=1),
        TypeError,
        (
            "train(lr: 'float', momentum: 'float' = 0.9) -> 'tuple[int, float, float]' cannot be called with these "
            "arguments: got an unexpected keyword argument 'learning_rate'"
        ),
    ),
    "an argument that is missing": (
        lambda: rw.launch(train, nproc=2),
        TypeError,
        "missing a required argument: 'lr'",
    ),
    "one that both have": (
        lambda: rw.launch(limited, timeout=5),
        rw.InvalidArgumentError,
        (
            "timeout= is an argument of launch() and of limited(): the one of the function goes into "
            "kwargs={'timeout': ...}"
        ),
    ),
    "one that is given twice": (
        lambda: rw.launch(train, lr=1, kwargs={"lr": 2}),
        TypeError,
        "'lr' is given twice: as an argument, and in kwargs",
    ),
    "a function that was called already": (
        lambda: rw.launch(train(0.1), nproc=2),  # type: ignore[arg-type]
        rw.InvalidArgumentError,
        "launch takes a function and its arguments, got (0, 0.1, 0.9): launch(train, 0.1), not launch(train(0.1))",
    ),
    "a variable that is no text": (
        lambda: rw.launch(train, 0.1, environ={"A": 1}),  # type: ignore[dict-item]
        rw.InvalidArgumentError,
        "environ['A']=1, of type int, is not a string",
    ),
    "an argument that cannot be pickled": (
        lambda: rw.launch(train, 0.1, threading.Lock(), nproc=1),
        rw.InvalidArgumentError,
        "argument 2, a lock, cannot be carried to other processes: cannot pickle",
    ),
    "a time that is none": (
        lambda: rw.launch(train, 0.1, timeout=0),
        rw.InvalidArgumentError,
        "timeout=0 is not a number of seconds above 0",
    ),
    "an option that an engine does not have": (
        lambda: rw.launch(train, 0.1, on="slurm", max_restarts=3),
        rw.InvalidArgumentError,
        "max_restarts= and on= exclude each other: an engine starts each job once",
    ),
}


@each_row(("call", "kind", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused_before_anything_starts(
    call: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


@pytest.mark.slow
def test_a_launch_that_does_not_end_in_time_is_stopped_with_the_stacks() -> None:
    with pytest.raises(TimeoutError, match=r"^the launch did not end within 8 s; rank 1 still ran\n") as caught:
        rw.launch(hang, nproc=2, timeout=8)
    assert isinstance(caught.value, rw.LaunchTimeoutError)
    assert "rank 1: hang at test_function_arguments.py" in str(caught.value)


@pytest.mark.rare
def test_the_time_counts_for_all_attempts_together(tmp_path: Path) -> None:
    with pytest.raises(rw.LaunchTimeoutError, match="did not end within 12 s; rank 0 still ran"):
        rw.launch(fail_and_hang, str(tmp_path), nproc=1, timeout=12, max_restarts=5)
    assert (tmp_path / "0").exists()


def fail_and_hang(folder: str) -> None:
    fail_at_first(folder)
    time.sleep(100)
