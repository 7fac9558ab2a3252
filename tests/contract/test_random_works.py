"""Random programs of blocking and non-blocking collectives in random groups: results as of blocking calls."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group

pytestmark = pytest.mark.ranks(2, 4, timeout=200)

LENGTHS = (1, 2000, 60_000)
Call = Callable[..., Any]


def random_call(choose: random.Random, members: list[int], rank: int) -> tuple[Call, Any]:
    """Return a call, and its result on this rank; all ranks draw the same numbers."""
    length, factor = choose.choice(LENGTHS), choose.randrange(1, 9)
    root, index = choose.choice(members), members.index(rank) if rank in members else -1
    own = torch.full((length,), float(rank * factor))
    total = float(sum(members) * factor)
    number = float(factor * index)
    pieces = [torch.full((length,), float(factor * position)) for position in range(len(members))]
    rows = [torch.full((length,), float(member * factor)) for member in members]
    kinds: list[tuple[Call, Any]] = [
        (lambda **more: rw.all_reduce({"n": rank * factor}, **more), {"n": int(total)}),
        (lambda **more: rw.all_reduce(own, **more), torch.full((length,), total)),
        (lambda **more: rw.all_reduce_(own.clone(), **more), torch.full((length,), total)),
        (lambda **more: rw.reduce_scatter(pieces, **more), torch.full((length,), number * len(members))),
        (lambda **more: rw.all_gather((rank, factor), **more), [(member, factor) for member in members]),
        (lambda **more: rw.all_gather_cat(own, **more), torch.cat(rows)),
        (lambda **more: rw.gather(own, dst=root, **more), rows if rank == root else None),
        (lambda **more: rw.reduce(own, dst=root, **more), torch.full((length,), total) if rank == root else None),
        (lambda **more: rw.all_to_all([own] * len(members), **more), rows),
        (lambda **more: rw.broadcast(own, src=root, **more), torch.full((length,), float(root * factor))),
        (lambda **more: rw.scatter(pieces, src=root, **more), torch.full((length,), number)),
        (lambda **more: rw.barrier(str(factor), **more), None),
    ]
    return choose.choice(kinds)


def random_transfer(choose: random.Random, members: list[int], rank: int) -> tuple[Call, Any]:
    """Return this rank's part in a transfer between two members, and its result; `no_part` if it has none."""
    src, dst = choose.sample(members, 2)
    value = torch.full((choose.choice(LENGTHS),), float(choose.randrange(100)))
    is_wrong = choose.random() < 0.1
    sent = threading.Lock() if is_wrong else value
    if rank == src:
        return (lambda **more: rw.send(sent, dst, **more)), rw.RankwiseError if is_wrong else None
    if rank == dst:
        return (lambda **more: rw.recv(src, **more)), rw.RankwiseError if is_wrong else value
    return no_part, None


def no_part(**_: Any) -> None:
    """Take no part in a transfer between other ranks."""


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except rw.RankwiseError as error:
        return error


@pytest.mark.soak(20)
def test_random_programs_have_the_results_of_blocking_calls(comm: Group, seed: int) -> None:
    """In some calls one rank passes what cannot be pickled, or calls something else: all members get an error there."""
    everyone, mine = random.Random(seed), random.Random(f"{seed} {rw.get_rank()}")  # noqa: S311 - not for security
    rank = rw.get_rank()
    sizes = [everyone.randrange(1, comm.size + 1) for _ in range(3)]
    groups = [comm, *(rw.new_group(everyone.sample(range(comm.size), size)) for size in sizes)]
    pending: list[tuple[rw.Work[Any], Any]] = []
    for _ in range(60):
        group = everyone.choice(groups)
        is_transfer = group.size > 1 and everyone.random() < 0.3
        call, expected = (random_transfer if is_transfer else random_call)(everyone, list(group.ranks), rank)
        fault = everyone.choice(["raise", "differ", *["none"] * 8])
        fault = "none" if is_transfer else fault
        faulty = everyone.choice(list(group.ranks))
        blocking = everyone.random() < 0.3
        if rank not in group.ranks or call is no_part:
            continue
        more = {"group": group}
        if fault != "none":
            expected = rw.RankwiseError if fault == "raise" or group.size > 1 else None
            if rank == faulty:
                call = {
                    "raise": lambda **more: rw.all_reduce(1, "nonsense", **more),
                    "differ": lambda **more: rw.barrier("another call", **more),
                }[fault]
        if blocking:
            check(outcome(lambda call=call, more=more: call(**more)), expected)  # type: ignore[misc]
        else:
            pending.append((call(**more, async_op=True), expected))
        while pending and mine.random() < 0.4:
            work, expected = pending.pop(mine.randrange(len(pending)))
            check(outcome(work.wait), expected)
    for work, expected in mine.sample(pending, len(pending)):
        check(outcome(work.wait), expected)
    assert rw.all_reduce(1) == comm.size


def check(result: Any, expected: Any) -> None:
    if expected is rw.RankwiseError:
        assert isinstance(result, rw.RankwiseError), result
    else:
        assert same(result, expected), (result, expected)
