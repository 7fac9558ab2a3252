"""A rank runs a program of tests/session/random_programs.py, and compares each result with the expected one.

Arguments: the program as JSON, and the route: "page", "sockets" or "several hosts".
"""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch

import rankwise as rw
from rankwise._comm.control.registry import GroupRegistry

program, route = json.loads(sys.argv[1]), sys.argv[2]
size, steps = program["size"], program["steps"]
end_step, end_rank, end_way = program["end"] or [len(steps), None, ""]
rank = int(os.environ["RANK"])
choose = random.Random(f"{program['seed']} {rank}")  # noqa: S311 - to be repeated
torch.set_num_threads(1)

Call = Callable[..., Any]


class Bad:
    """Cannot be pickled."""

    def __reduce__(self) -> str:
        raise ValueError(f"raised on rank {rank}")


def tensor(length: int, value: int) -> torch.Tensor:
    return torch.full((length // 4,), float(value))


def text(length: int, member: int) -> dict[str, Any]:
    return {"from": member, "text": "x" * (length + member)}


def collective(kind: str, ranks: list[int], length: int, number: int) -> tuple[Call, Any]:
    """Return a call, and its result on this rank."""
    own, root, total = ranks.index(rank), ranks[number % len(ranks)], sum(ranks)
    is_root = rank == root
    calls: dict[str, tuple[Call, Any]] = {
        "all_reduce number": (functools.partial(rw.all_reduce, rank), total),
        "all_reduce tensor": (functools.partial(rw.all_reduce, tensor(length, rank)), tensor(length, total)),
        "all_reduce dict": (
            functools.partial(rw.all_reduce, {"n": rank, "t": tensor(length, rank)}),
            {"n": total, "t": tensor(length, total)},
        ),
        "reduce": (
            functools.partial(rw.reduce, tensor(length, rank), dst=root),
            tensor(length, total) if is_root else None,
        ),
        "all_gather object": (functools.partial(rw.all_gather, text(length, rank)), [text(length, r) for r in ranks]),
        "all_gather tensor": (
            functools.partial(rw.all_gather, tensor(length + 4 * rank, rank)),
            [tensor(length + 4 * r, r) for r in ranks],
        ),
        "gather": (
            functools.partial(rw.gather, tensor(length, rank), dst=root),
            [tensor(length, r) for r in ranks] if is_root else None,
        ),
        "broadcast": (functools.partial(rw.broadcast, text(length, rank), src=root), text(length, root)),
        "scatter": (
            functools.partial(rw.scatter, [tensor(length, r) for r in ranks] if is_root else None, src=root),
            tensor(length, rank),
        ),
        "all_to_all": (
            functools.partial(rw.all_to_all, [tensor(length + 4 * r, rank) for r in ranks]),
            [tensor(length + 4 * rank, r) for r in ranks],
        ),
        "reduce_scatter": (
            functools.partial(rw.reduce_scatter, [tensor(length, r) for r in ranks]),
            tensor(length, ranks[own] * len(ranks)),
        ),
        "barrier": (functools.partial(rw.barrier, "together"), None),
    }
    return calls[kind]


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


def outcome(call: Call) -> Any:
    try:
        return call()
    except rw.RankwiseError as error:
        return error


def check(step: int, result: Any, ranks: list[int], expected: Any, fault: Any, *, is_pending: bool = False) -> None:
    """Check the outcome of a call: the result, or an error that names the rank that is its cause."""
    error = result if isinstance(result, Exception) else None
    about = f"step {step} of rank {rank}: {steps[step]}: {error or type(result)}"
    if end_rank in ranks and type(error) is rw.CollectiveError and f"rank {end_rank}" in str(error):
        # A call that began before may have ended before as well. What one rank ends, others may not have ended.
        assert step >= end_step or is_pending, about
        return
    assert not (end_rank in ranks and step >= end_step and end_way != "kill soon" and fault is None), about
    if fault is None or fault[1] == "stop":
        assert error is None, about
        assert same(result, expected), about
    elif fault[1] == "raise":
        if rank == fault[0]:
            assert isinstance(error, rw.PayloadTypeError), about
        else:
            assert isinstance(error, rw.RemoteRankError), about
            assert error.rank == fault[0], about
        assert f"raised on rank {fault[0]}" in str(error), about
    else:
        assert isinstance(error, rw.MismatchError), about


def run() -> None:
    """Run the steps."""
    groups: list[tuple[list[int], rw.Group | None]] = [(list(range(size)), None)]
    pending: list[tuple[int, rw.Work[Any], list[int], Any, Any]] = []
    for number, (what, *arguments) in enumerate(steps):
        if (number, rank) == (end_step, end_rank):
            end()
        if what == "group":
            made = outcome(functools.partial(new_group, arguments[0]))
            if number < end_step or not isinstance(made, Exception):
                assert isinstance(made, rw.Group), made
            groups.append((arguments[0], None if number >= end_step else made))
        elif what == "wait":
            for _ in range(choose.randrange(len(pending) + 1)):
                finish(pending.pop(choose.randrange(len(pending))))
        else:
            ranks, group = groups[arguments[0]]
            if rank in ranks and (group is not None or not arguments[0]):
                use(number, ranks, group, pending)
    for work in choose.sample(pending, len(pending)):
        if choose.random() < 0.8:  # some works are never waited for
            finish(work)


def new_group(ranks: list[int]) -> rw.Group:
    """Make a group; between hosts, torch connects its members, and a rank that leaves meanwhile would be missed."""
    group = rw.new_group(ranks)
    if route == "several hosts":
        rw.barrier()
    return group


def use(number: int, ranks: list[int], group: rw.Group | None, pending: list[Any]) -> None:
    """Run a step in a group that this rank is a member of."""
    what, _, *arguments = steps[number]
    if what == "close":
        assert group is not None
        closed = outcome(group.close)  # between hosts, the members wait for each other
        assert closed is None or (end_rank in ranks and f"rank {end_rank}" in str(closed)), closed
    elif what == "pair":
        source, destination, length = (ranks[arguments[0]], ranks[arguments[1]], arguments[2])
        if rank == source:
            sent = outcome(lambda: rw.send(text(length, rank), dst=destination, group=group))
            check(number, sent, [source, destination], None, None)
        elif rank == destination:
            received = outcome(lambda: rw.recv(src=source, group=group))
            check(number, received, [source, destination], text(length, source), None)
    else:
        kind, length, async_op, fault = arguments
        call, expected = collective(kind, ranks, length, number)
        if fault is not None and rank == fault[0]:
            call = faulty(fault[1], call, length)
        if async_op:
            pending.append((number, call(group=group, async_op=True), ranks, expected, fault))
        else:
            check(number, outcome(lambda: call(group=group)), ranks, expected, fault)


def faulty(way: str, call: Call, length: int) -> Call:
    """Return another call, or stop before the same one."""
    if way == "raise":
        return functools.partial(rw.all_gather, Bad())
    if way == "differ":
        return functools.partial(rw.barrier, "alone")
    if way == "shape":
        return functools.partial(rw.all_reduce, torch.ones(length // 4 + 7, 2))
    with subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)
    return call


def finish(work: tuple[int, rw.Work[Any], list[int], Any, Any]) -> None:
    number, waited, ranks, expected, fault = work
    check(number, outcome(waited.wait), ranks, expected, fault, is_pending=True)


def end() -> None:
    """Take part in nothing any more."""
    if end_way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end_way == "kill soon":
        threading.Timer(choose.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif end_way == "exit":
        os._exit(7)
    elif end_way == "raise":
        raise ValueError("no data")
    else:
        raise Leave


class Leave(BaseException):
    """The rank leaves the session."""


def use_route(patch: pytest.MonkeyPatch) -> None:
    """Let the ranks of one host connect as those of a host without a page, or as those of several hosts."""
    if route == "sockets":
        patch.setattr("rankwise._comm.control.page.handshake.MAX_RANKS", 0)
    elif route == "several hosts":
        several = {"one_host": False, "own_address": lambda: "127.0.0.1"}
        patch.setattr("rankwise._comm.control.links.connect.network_id", lambda: f"host {rank // 2}")
        patch.setattr("rankwise._session.lifecycle.GroupRegistry", lambda **more: GroupRegistry(**more | several))


def held() -> tuple[list[str], int]:
    """Return the descriptors of this process, but for pipes, which gloo may leave, and the number of its threads."""
    gc.collect()
    files = []
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):  # that of the listing
            files.append(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115
    return sorted(file for file in files if not file.startswith("pipe:")), psutil.Process().num_threads()


use_route(pytest.MonkeyPatch())
before = held()
try:
    with rw.init(timeout=150):
        rw.barrier()
        run()
        if end_way == "kill soon" and rank == end_rank:
            signal.pause()
except Leave:
    pass
after = held()
assert after == before, (before, after)
