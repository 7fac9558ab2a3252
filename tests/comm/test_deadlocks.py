"""Deadlocks between groups on simulated hosts: ranks that wait for each other in two groups all raise, and go on."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from rankwise._comm.control.registry import GroupRegistry
from rankwise._comm.control.verdict import Verdict
from rankwise.errors import CollectiveError, MismatchError
from tests.comm.simulation import Process, Waits, World, call_of, clock

TIMEOUT = 100.0
# What a rank waits for before it looks at all, twice, and each way to the store and back.
SOON = 10.0


def agree(own: Process, group: int) -> Waits:
    """Take part in an exchange of a group as `Control.agree` does, and return the verdict."""
    channel, suspects = own.channels[group], set[int]()
    registry: Any = SimpleNamespace(rank=own.rank, channels=own.channels)
    registry._waiting_frame = partial(GroupRegistry._waiting_frame, registry)
    call = call_of(own.rank, group, "differ" if group else "call")

    def look(late: Any) -> None:
        GroupRegistry.detect_cross_group_deadlock(registry, channel, call.text, late, suspects)

    verdict: Verdict = yield from channel.agree(call, b"", combine=None, read=(), timeout=TIMEOUT, on_pause=look)
    for waiting in verdict.waiting:
        GroupRegistry.notify_other_group(registry, channel, call.text, waiting)
    return verdict


def in_order(own: Process, order: list[int], errors: dict[int, Any], last: dict[int, Any]) -> Waits:
    """Make calls of groups, up to the first error; and then one of each group, in the same order on all ranks."""
    for group in order:
        verdict = yield from agree(own, group)
        if verdict.error is not None:
            errors[own.rank] = verdict.error, own.now
            break
    yield from clock.sleep(2 * SOON - own.now)
    for group in sorted(own.channels):
        verdict = yield from agree(own, group)
        last[own.rank] = verdict.error


@pytest.mark.soak(100)
def test_ranks_that_wait_for_each_other_in_two_groups(seed: int) -> None:
    for number in range(20):
        rng = random.Random(100 * seed + number)  # noqa: S311 - to be repeated
        num_ranks = rng.randint(2, 24)
        hosts = sorted(rng.randrange(rng.choice([2, 4, 24])) for _ in range(num_ranks))
        both = sorted(rng.sample(range(num_ranks), rng.randint(2, num_ranks)))
        second_first = set(rng.sample(both, rng.randint(1, len(both) - 1)))
        world = World(hosts, [range(num_ranks), both], seed=rng.randrange(1 << 30), has_pages=rng.random() < 0.8)
        errors: dict[int, Any] = {}
        last: dict[int, Any] = {}
        for process in world.processes:
            order = [1, 0] if process.rank in second_first else [0, 1] if process.rank in both else [0]
            process.start(in_order(process, order, errors, last))
        world.run(1000.0)
        for process in world.processes:
            process.close()
        about = f"seed {seed}, {number}: {hosts}, {both}, {second_first}"
        assert errors.keys() == set(range(num_ranks)), about
        for error, ended in errors.values():
            assert isinstance(error, MismatchError | CollectiveError), about
            assert "wait for each other in different groups" in str(error), about
            assert str(error).count("\n  rank") >= 2, f"{about}: {error}"
            assert ended < SOON, about
        assert last == dict.fromkeys(range(num_ranks)), about
