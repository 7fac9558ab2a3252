"""Random programs of exchanges and data in overlapping groups: each member gets the outcome that a simple model has.

Each rank has one thread, or one for every second group. In a step, a member fails, makes another call, leaves the
group, or comes after another one has waited for as long as its timeout: this with one thread only, since the message of
a timeout may arrive behind data of another group, and a member that has not received it goes on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import rankwise as rw
from rankwise._comm.buffers import memory_of
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.protocol import Description
from rankwise._comm.control.verdict import Outcome, Verdict
from tests.comm.conftest import ROUTES
from tests.comm.members import Member, agree, failed, in_threads, open_group
from tests.lanes import variants

RANKS = range(10, 14)
# About the room of a slot; and what a connection takes at once, and more. Messages of collectives have some kilobytes.
BODY_LENGTHS = (0, 1, 100, 8000, 9000, 20_000)
DATA_LENGTHS = (0, 1, 1000, 300_000, 1_000_000)
WAYS = ("call", "call", "call", "call", "fail", "differ")
# Which of two threads looks first depends on time, so smaller examples would mislead.
EXAMPLES = settings(
    max_examples=4,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass(kw_only=True)
class Step:
    """A step of the members of one group.

    Attributes:
        group: The index of the group.
        ways: What each member does.
        leaves: The member that leaves the group before it, if any.
        late: The member that comes after the others have finished, since one of them does not wait for long; if any.
        impatient: The member that does not wait for long then.
        bodies: The lengths of the bodies.
        data: The length of the data that each member sends to each other one.
        finished: Set for each member that has finished it.
    """

    group: int
    ways: list[str]
    leaves: int | None
    late: int | None
    impatient: int
    bodies: list[int]
    data: list[int]
    finished: list[threading.Event] = field(default_factory=list)


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[list[int]], list[Step]]:
    """Draw the number of threads of each rank, groups of ranks, and steps."""
    num_threads = draw(st.integers(1, 2))
    subsets = st.lists(st.sampled_from(RANKS), min_size=2, max_size=len(RANKS), unique=True).map(sorted)
    groups = draw(st.lists(subsets, min_size=1, max_size=5))
    steps = []
    for _ in range(draw(st.integers(1, 30))):
        group = draw(st.integers(0, len(groups) - 1))
        size = len(groups[group])
        member = st.integers(0, size - 1)
        ways = draw(st.lists(st.sampled_from(WAYS), min_size=size, max_size=size))
        kind = draw(st.sampled_from(["plain"] * 8 + ["leave", "late"] * (num_threads == 1) + ["leave"]))
        late, impatient = draw(st.permutations(range(size)))[:2]
        steps.append(
            Step(
                group=group,
                ways=ways if draw(st.booleans()) and kind != "late" else ["call"] * size,
                leaves=draw(member) if kind == "leave" else None,
                late=late if kind == "late" else None,
                impatient=impatient,
                bodies=draw(st.lists(st.sampled_from(BODY_LENGTHS), min_size=size, max_size=size)),
                data=draw(st.lists(st.sampled_from(DATA_LENGTHS), min_size=size, max_size=size)),
            )
        )
    return num_threads, groups, steps


def take_part(member: Member, own: int, step: Step) -> Any:
    """Take part in a step; return the verdict, or the exception."""
    body = bytes([own]) * step.bodies[own]
    timeout = 0.02 if step.late is not None and own == step.impatient else 100.0
    try:
        if step.ways[own] == "fail":
            with member.channel.held():
                member.channel.post(failed(member, f"ValueError: of {own}"), timeout=100.0)
            return None
        if step.ways[own] == "differ":
            other = Description("barrier", {"by": own}, site="train.py:99")
            verdict = member.channel.agree(other, body, timeout=timeout, on_pause=lambda _: None)
            return verdict.error or verdict
        verdict = agree(member, body, timeout=timeout, read=range(len(step.ways)))
        if set(step.ways) == {"call"}:
            return verdict, exchange_data(member, own, step.data)
    except rw.RankwiseError as error:
        return error
    else:
        return verdict


def exchange_data(member: Member, own: int, lengths: Sequence[int]) -> list[bytes]:
    """Send bytes to each other member, and return those of the others."""
    others = [other for other in range(len(lengths)) if other != own]
    received = {other: torch.zeros(length, dtype=torch.uint8) for other, length in enumerate(lengths)}
    received[own].fill_(own)
    member.channel.transfer(
        {other: received[own] for other in others if lengths[own]},
        {other: received[other] for other in others if lengths[other]},
        timeout=100.0,
    )()
    return [bytes(memory_of(data)) for data in received.values()]


def run_member(members: dict[int, Member], groups: list[list[int]], steps: list[Step], rank: int) -> None:
    """Run the steps of a rank in the groups that are given, those of one of its threads, and check the outcomes."""
    left: dict[int, int] = {}
    for number, step in enumerate(steps):
        ranks = groups[step.group]
        if step.group not in members:
            continue
        own = ranks.index(rank)
        if step.leaves is not None and step.group not in left:
            left[step.group] = step.leaves
            if own == step.leaves:
                members[step.group].channel.close("left in a program")
        gone = left.get(step.group)
        if gone == own:
            continue
        if step.late == own and gone is None:
            for other, event in enumerate(step.finished):
                assert other == own or event.wait(100)
        try:
            check(take_part(members[step.group], own, step), own, step, ranks, gone)
        except AssertionError as error:
            raise AssertionError(f"step {number} of rank {rank}, {step}: {error}") from error
        finally:
            step.finished[own].set()


def check(found: Any, own: int, step: Step, ranks: list[int], gone: int | None) -> None:
    """Compare the outcome of a step with the model."""
    failed = [member for member, way in enumerate(step.ways) if way == "fail" and member != gone]
    if own in failed:
        assert found is None, found
    elif gone is not None and type(found) is rw.CollectiveError:
        assert f"rank {ranks[gone]}" in str(found), found
        assert "left in a program" in str(found), found
    elif failed:
        assert isinstance(found, rw.RemoteRankError), found
        assert found.rank in [ranks[member] for member in failed], found
    elif gone is not None:
        raise AssertionError(found)
    elif step.late is not None:
        assert isinstance(found, rw.CollectiveTimeoutError), found
        assert f"rank {ranks[step.late]}" in str(found).partition("Missing: ")[2], found
    elif "differ" in step.ways:
        assert isinstance(found, rw.MismatchError), found
        assert "train.py:99" in str(found), found
    else:
        verdict, data = found
        assert isinstance(verdict, Verdict), verdict
        assert verdict.outcome is Outcome.AGREED
        bodies = [bytes([member]) * length for member, length in enumerate(step.bodies)]
        assert [verdict.bodies[member] for member in range(len(ranks))] == bodies
        assert data == [bytes([member]) * length for member, length in enumerate(step.data)]


@pytest.mark.soak(300)
@pytest.mark.parametrize("route", variants(ROUTES, fast={"page"}, slow={"led sockets"}), indirect=True)
@pytest.mark.parametrize("links", [len(RANKS)], indirect=True)
def test_random_exchanges(links: list[Links], seed: int) -> None:
    ids = iter(range(1_000_000))

    @hypothesis.seed(seed)
    @EXAMPLES
    @given(programs())
    def run(program: tuple[int, list[list[int]], list[Step]]) -> None:
        num_threads, groups, steps = program
        for step in steps:
            step.finished = [threading.Event() for _ in groups[step.group]]
        opened = [{member.links.rank: member for member in open_group(links, next(ids), ranks)} for ranks in groups]

        def run_thread(number: int) -> None:
            rank, thread = RANKS[number // num_threads], number % num_threads
            mine = {
                index: opened[index][rank] for index in range(thread, len(groups), num_threads) if rank in opened[index]
            }
            run_member(mine, groups, steps, rank)

        outcomes = in_threads(run_thread, num_threads * len(RANKS))
        for group in opened:
            for rank in random.Random(len(steps)).sample(sorted(group), len(group)):  # noqa: S311 - to be repeated
                group[rank].channel.close("closed the group")
        assert outcomes == [None] * len(outcomes), [outcome for outcome in outcomes if outcome is not None]

    run()
