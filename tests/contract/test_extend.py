"""Collectives written with `rankwise.extend.collectives` have the contract of rankwise's own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise.extend.collectives import MAX_MESSAGE_BYTES, Members, collective
from tests.session.worlds import clean_environ, free_port

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.slow_with_ranks(1, 3), pytest.mark.usefixtures("session")]


def line_of(text: str) -> int:
    """Return the number of the only line of this file that contains a text, but for the calls of this function."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line and "line_of" not in line]
    return number


def shared_text(text: str, *, group: rw.Group | None = None) -> list[str]:
    """Return the texts of all ranks: a collective of the kind that another package has."""
    with collective("shared_text", group=group) as members:
        if not isinstance(text, str):
            raise TypeError(f"a text is wanted, got {text!r}")
        return [message.decode() for message in members.all_gather_bytes(text.encode())]


def next_call_works() -> None:
    assert rw.all_reduce(1) == rw.get_world_size()
    assert shared_text("x") == ["x"] * rw.get_world_size()


def test_each_exchange_returns_what_the_members_sent(comm: rw.Group) -> None:
    rank, size, last = rw.get_rank(), rw.get_world_size(), rw.get_world_size() - 1
    with collective("everything", settings={"step": "a"}, values={"": "int"}) as members:
        assert (members.rank, members.size, members.ranks) == (rank, size, tuple(range(size)))
        members.verify()
        assert members.all_gather_bytes(b"x" * rank) == [b"x" * other for other in range(size)]
        gathered = members.gather_bytes(bytes([rank]), dst=last)
        assert gathered == ([bytes([other]) for other in range(size)] if rank == last else None)
        assert members.broadcast_bytes(b"from %d" % rank, src=last) == b"from %d" % last
        assert members.scatter_bytes([b"for %d" % other for other in range(size)], src=last) == b"for %d" % rank
        assert members.all_reduce({"a": torch.tensor(rank)})["a"].item() == sum(range(size))
        assert members.all_gather(("any", rank)) == [("any", other) for other in range(size)]
        assert members.gather(rank) == (list(range(size)) if rank == 0 else None)
        assert members.broadcast(rank, src=last) == last
        assert members.scatter(list("abcd"[:size])) == "abcd"[rank]


def test_tensors_are_exchanged_in_any_shapes_and_types(comm: rw.Group) -> None:
    """As a dispatch to experts: a rank sends each other one so many rows as its rank, and nothing to rank 0."""
    rank, size = rw.get_rank(), rw.get_world_size()
    outgoing = {dst: torch.full((dst, 2), rank, dtype=(torch.int16, torch.bool)[dst % 2]) for dst in range(size)}
    with collective("dispatch") as members:
        received = members.exchange({dst: outgoing[dst] for dst in range(1, size)})
        nothing = members.exchange({})
        own = members.exchange({rank: torch.arange(6.0).reshape(2, 3).t()})[rank]
    assert nothing == {}
    assert own.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert list(received) == (list(range(size)) if rank else [])
    for src, tensor in received.items():
        assert tensor.dtype is (torch.int16, torch.bool)[rank % 2]
        assert torch.equal(tensor, torch.full((rank, 2), src, dtype=tensor.dtype))
    next_call_works()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("exchanges", [0, 1, 2])
def test_an_exception_in_the_block_is_raised_on_all(exchanges: int) -> None:
    def call() -> None:
        with collective("checked") as members:
            for _ in range(exchanges):
                members.all_gather_bytes(b"")
            if rw.get_rank() == 1:
                raise KeyError("lost")
            members.verify()

    if rw.get_rank() == 1:
        with pytest.raises(KeyError, match="lost"):
            call()
    else:
        with pytest.raises(rw.RemoteRankError, match=r"rank 1 on .* raised KeyError: 'lost'"):
            call()
    next_call_works()


@pytest.mark.ranks(2, 3)
def test_an_exception_in_a_block_without_exchanges_is_raised_in_the_next_collective() -> None:
    def call() -> float:
        with collective("checks"):
            if rw.get_rank() == 1:
                raise KeyError("lost")
        return rw.all_reduce(1.0)

    with pytest.raises(KeyError if rw.get_rank() == 1 else rw.RemoteRankError, match="lost"):
        call()
    next_call_works()


def other_collective(members: Members) -> None:
    members.broadcast(1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("settings", "values", "then", "said"),
    [
        ({"lr": 1}, {}, Members.verify, "tuned(lr=0) on rank 0, tuned(lr=1) on rank 1"),
        ({"lr": 0}, {"x": "int"}, Members.verify, "x is nothing on rank 0, int on rank 1"),
        ({"lr": 0}, {}, other_collective, "tuned(lr=0) on rank 0, broadcast(src=0) on rank 1"),
    ],
)
def test_calls_that_differ_are_named_with_the_lines_of_their_callers(
    settings: dict[str, object], values: dict[str, str], then: Callable[[Members], None], said: str
) -> None:
    def tuned(then: Callable[[Members], None]) -> None:
        with collective("tuned", settings={"lr": 0}) as members:
            if rw.get_rank() == 1:
                members.settings, members.values = settings, values
            then(members)

    with pytest.raises(rw.MismatchError) as caught:
        if rw.get_rank() == 0:
            tuned(Members.verify)  # the first
        else:
            tuned(then)  # the second
    assert said in str(caught.value)
    frames = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert frames[-1] in {"tuned", "other_collective"}, "the line of the user's that calls verify() or broadcast()"
    assert f"at {Path(__file__).name}:{line_of('# the first')}" in str(caught.value)
    if then is Members.verify:
        assert f"at {Path(__file__).name}:{line_of('# the second')}" in str(caught.value)
    next_call_works()


@pytest.mark.ranks(2)
def test_different_steps_of_one_collective_are_a_mismatch() -> None:
    def call() -> None:
        with collective("steps") as members:
            members.verify()
            if rw.get_rank() == 0:
                members.verify()
        rw.barrier()

    with pytest.raises(rw.MismatchError, match=re.escape("steps(step=2) on rank 0, barrier() on rank 1")):
        call()
    next_call_works()


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_in_time_is_named() -> None:
    done = Path(tempfile.gettempdir()) / rw.broadcast(f"done-{time.time_ns()}")
    if rw.get_rank() == 1:
        while not done.exists():
            time.sleep(0.01)
    with pytest.raises(rw.CollectiveTimeoutError), collective("late") as members:
        try:
            members.verify(timeout=0.5)
        finally:
            done.touch()
    rw.barrier()
    if rw.get_rank() == 0:
        done.unlink()
    next_call_works()


@pytest.mark.ranks(3)
def test_a_group_is_a_group_of_its_own() -> None:
    with rw.new_group([0, 2]) as group:
        if rw.get_rank() == 1:
            with pytest.raises(rw.InvalidArgumentError, match="not a member"):
                shared_text("x", group=group)
        else:
            assert shared_text(str(rw.get_rank()), group=group) == ["0", "2"]
            with collective("in a group", group=group) as members:
                assert members.ranks == (0, 2)
                assert members.broadcast_bytes(bytes([rw.get_rank()]), src=2) == b"\2"
                assert list(members.exchange({2: torch.ones(1)})) == ([0, 2] if rw.get_rank() == 2 else [])


WRONG: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda members: members.all_gather_bytes("text"), TypeError, "a message is bytes, got 'text'"),
    (
        lambda members: members.all_gather_bytes(bytes(MAX_MESSAGE_BYTES + 1)),
        ValueError,
        "at most 4096 bytes, got 4097",
    ),
    (lambda members: members.broadcast_bytes(b"", src=9), ValueError, "src=9 is not a member"),
    (lambda members: members.gather_bytes(b"", dst="0"), ValueError, "dst='0', of type str, is not an integer"),
    (lambda members: members.scatter_bytes([]), ValueError, "one message for each of"),
    (lambda members: members.verify(timeout=-1), ValueError, "timeout=-1 is not a number of seconds"),
    (lambda members: members.exchange([1]), ValueError, "takes a mapping of ranks to tensors"),
    (lambda members: members.exchange({0: 3}), TypeError, "sends tensors, got a number"),
    (lambda members: members.exchange({7: torch.ones(1)}), ValueError, "a rank of exchange=7 is not a member"),
    (lambda members: members.exchange({0: torch.ones(1).to_sparse()}), TypeError, "only dense tensors"),
    (lambda _: shared_text("nested"), rw.CollectiveError, "cannot begin inside of wrong at"),
    (lambda _: rw.barrier(), rw.CollectiveError, "cannot begin inside of wrong at"),
    (lambda members: members.__enter__(), rw.CollectiveError, "a collective is run once"),
]


@pytest.mark.ranks(2)
def test_misuse_of_an_exchange_is_an_error_on_all_ranks() -> None:
    for misuse, kind, said in WRONG:
        with pytest.raises((kind, rw.RemoteRankError)) as caught, collective("wrong") as members:
            if rw.get_rank() == 0:
                misuse(members)
            members.verify()
        assert said in str(caught.value)
        assert (type(caught.value) is rw.RemoteRankError) == (rw.get_rank() == 1)
        next_call_works()


def test_an_exchange_outside_of_its_block_is_an_error() -> None:
    with collective("outside") as members:
        members.verify()
        with pytest.raises(rw.CollectiveError, match="are assigned before the first exchange"):
            members.settings = {"a": 1}
    for exchange in (members.verify, lambda: members.broadcast(1), lambda: members.exchange({})):
        with pytest.raises(rw.CollectiveError, match="outside of the block"):
            exchange()
    for wrong in ({"name": 3}, {"settings": 3}, {"settings": {3: 4}}, {"values": ["x"]}, {"group": [0]}):
        with pytest.raises(rw.InvalidArgumentError):
            collective(**{"name": "wrong", **wrong})  # type: ignore[arg-type]
    next_call_works()


def test_an_exchange_after_one_that_failed_is_an_error() -> None:
    with collective("again") as members:
        with pytest.raises(rw.PayloadTypeError):
            members.broadcast(threading.Lock(), src=0) if rw.get_world_size() == 1 else members.exchange({0: 1})  # type: ignore[dict-item]
        with pytest.raises(rw.CollectiveError, match="after one that failed"):
            members.verify()
    next_call_works()


DIES = """
import os, signal
import rankwise as rw
from rankwise.extend.collectives import collective

with rw.init(timeout=100):
    with collective("deadly") as members:
        members.verify()
        if members.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            members.verify()
        except rw.CollectiveError as error:
            print(error)
"""


@pytest.mark.ranks(1)
def test_a_member_that_dies_is_an_error_on_the_others() -> None:
    """In processes of their own: a launcher would stop the others."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", DIES]
    ranks = [
        subprocess.Popen(command, env=clean_environ(RANK=str(rank), **common), stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert ranks[1].returncode == -signal.SIGKILL
    assert "rank 1" in texts[0]
    assert "died" in texts[0] or "dead" in texts[0], texts[0]
