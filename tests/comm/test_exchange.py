"""Exchanges of simulated ranks: random programs with random faults, each repeated by its seed, against the contract."""

from __future__ import annotations

import pickle
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from rankwise._comm.control import branch
from rankwise._comm.control.calls import Calls, encode_calls
from rankwise._comm.control.exchange import GRACE_SECONDS, Exchange, Inbox
from rankwise._comm.control.protocol import Description, Frame, FrameKind, mismatch_error
from rankwise._comm.control.tree import FAN_OUT, Tree
from rankwise._comm.control.verdict import Outcome, Verdict
from rankwise.errors import CollectiveError, CollectiveTimeoutError, MismatchError, RankwiseError, RemoteRankError
from tests.comm.simulation import (
    KEEPALIVE_SECONDS,
    NEVER,
    Action,
    Costs,
    Ending,
    Step,
    World,
    body_of,
    call_of,
    copy_of,
    cost,
    run_steps,
)

# What may pass after the last event that an exchange needs, until it has ended for all: members wait for a rank that
# may be gone, look at the board, and wait for a verdict that may be on its way.
MOMENT = 6.0
# How long before a timeout a member may have come, or the first one that has come on its host, and be named as missing:
# its unit is not complete, or another leader is late, and that first one has not written on the board yet who waits.
UNSEEN = 1.2
# How long after a timeout a member may come, and not be named as missing.
SLACK = 0.1
# How long after its timeout a member waits at most, for what others say and for its leader.
TOLERANCE = 2 * branch._TOLERANCE_SECONDS + 2.0
FAULTS = ("late", "skip", "fail", "differ", "kill", "kill", "kill_in", "kill_in", "impatient", "leave")


@dataclass(kw_only=True)
class Program:
    """What the ranks of a simulated world do.

    Attributes:
        hosts: The host of each rank.
        groups: The members of each group.
        steps: The steps.
        kills: When ranks are killed.
        kills_in: After how many operations ranks are killed.
        cuts: When hosts are cut off.
        has_pages: The ranks of a host share a page.
    """

    hosts: list[int]
    groups: list[list[int]]
    steps: list[Step]
    kills: dict[int, float] = field(default_factory=dict)
    kills_in: dict[int, int] = field(default_factory=dict)
    cuts: dict[int, float] = field(default_factory=dict)
    has_pages: bool = True


def random_program(generator: random.Random, faults: Sequence[str], *, num_faults: int, max_hosts: int = 24) -> Program:
    """Draw a program with so many faults."""
    num_hosts = generator.choice([1, 2, 2, 3, 3, 5, 18, max_hosts])
    size = generator.choice([1, 1, 2, 2, 3, 8]) if num_hosts < 10 else generator.choice([1, 1, 2])
    hosts = [host for host in range(num_hosts) for _ in range(generator.choice([size, size, 1]))]
    if len(hosts) < 2:
        hosts = [0, 0]
    if generator.random() < 0.2:
        generator.shuffle(hosts)  # the hosts are numbered in another order than the ranks
    everyone = list(range(len(hosts)))
    sizes = [generator.randint(2, len(everyone)) for _ in range(generator.choice([0, 0, 1, 2]))]
    groups = [everyone, *(sorted(generator.sample(everyone, size)) for size in sizes)]
    timeout = generator.choice([0.1, 0.3, 1.0, 3.0, 30.0])
    steps = []
    for _ in range(generator.randint(2, 6)):
        group = generator.choice([0, *range(len(groups))])
        spread = generator.choice([0.0, 0.02, 0.2, 1.2])
        reads = generator.choice([(), groups[group], groups[group][:1], generator.sample(groups[group], 1)])
        steps.append(
            Step(
                group=group,
                actions={
                    rank: Action(
                        wait=generator.uniform(0, min(spread, timeout / 3)), timeout=timeout, reads=rank in reads
                    )
                    for rank in groups[group]
                },
                body_bytes=generator.choice([0, 2, 100, 10_000]),
                combines=generator.random() < 0.5,
            )
        )
    program = Program(hosts=hosts, groups=groups, steps=steps, has_pages=generator.random() < 0.9)
    for _ in range(num_faults):
        add_fault(program, generator.choice(faults), generator)
    return program


def add_fault(program: Program, fault: str, generator: random.Random) -> None:
    """Add a fault to a program."""
    step = generator.choice(program.steps)
    rank = generator.choice(list(step.actions))
    if generator.random() < 0.5:  # a leader, the root above all
        rank = next(iter(step.actions)) if generator.random() < 0.5 else program.hosts.index(program.hosts[rank])
    action = step.actions.get(rank)
    if fault == "kill":
        program.kills[rank] = generator.uniform(0, generator.choice([0.05, 0.5, 3.0]))
    elif fault == "kill_in":
        program.kills_in[rank] = generator.randint(0, generator.choice([20, 100, 300]))
    elif fault == "cut":
        program.cuts[program.hosts[rank]] = generator.uniform(0, 1.0)
    elif action is None:
        return
    elif fault == "late":
        # About when the root, and others, end the exchange; and when those raise that have waited for the root.
        ends = [0.0, branch._TOLERANCE_SECONDS, 2 * branch._TOLERANCE_SECONDS]
        moment = generator.choice(ends) + generator.choice([0.0, GRACE_SECONDS]) + generator.uniform(-0.05, 0.05)
        action.wait = action.timeout + generator.choice([moment, moment, generator.uniform(0, 3)])
    elif fault == "impatient":
        action.timeout = generator.uniform(0.1, min(1.0, action.timeout))
        other = step.actions[generator.choice(list(step.actions))]
        other.wait += generator.choice([action.timeout + generator.uniform(-0.05, 0.05), 1.0])
    else:
        action.way = fault


def run(program: Program, seed: int, costs: Costs = Costs()) -> tuple[World, list[dict[int, Ending]]]:  # noqa: B008
    """Run a program until nothing happens any more."""
    world = World(program.hosts, program.groups, costs=costs, seed=seed, has_pages=program.has_pages)
    for rank, time in program.kills.items():
        world.kill_at(rank, time)
    for rank, number in program.kills_in.items():
        world.processes[rank].operations_left = number
    for host, time in program.cuts.items():
        world.cut_off_at(host, time)
    return world, run_steps(world, program.steps, 10_000.0)


class Oracle:
    """Compares what happened with the contract."""

    def __init__(self, program: Program, world: World, endings: Sequence[dict[int, Ending]]) -> None:
        self.program, self.world, self.endings = program, world, endings
        self.gone: list[dict[int, float]] = [
            {process.rank: process.died for process in world.processes if process.died < NEVER} for _ in program.groups
        ]
        self.left: list[dict[int, float]] = [{} for _ in program.groups]
        for step, ended in zip(program.steps, endings, strict=True):
            for rank, ending in ended.items():
                if step.actions[rank].way == "leave":
                    self.gone[step.group][rank] = min(ending.entered, self.gone[step.group].get(rank, NEVER))
                    self.left[step.group].setdefault(rank, ending.entered)
        self.outcomes: Counter[str] = Counter()
        self._must_fail: set[int] = set()

    def check(self) -> None:
        """Check all steps, and what is left."""
        for number in range(len(self.program.steps)):
            try:
                self._check_step(number)
            except AssertionError as error:
                raise AssertionError(f"step {number}: {error}") from error
        self._check_rest()

    def _check_step(self, number: int) -> None:
        step, ended = self.program.steps[number], self.endings[number]
        ranks, gone = self.program.groups[step.group], self.gone[step.group]
        left = self.left[step.group]
        waiting = {
            rank: ending
            for rank, ending in ended.items()
            if step.actions[rank].way in ("call", "differ") and self.world.processes[rank].died == NEVER
        }
        failed = [rank for rank in ended if step.actions[rank].way == "fail"]
        for rank, ending in waiting.items():
            assert ending.ended < NEVER, f"rank {rank} hangs since {ending.entered}"
        if not waiting:
            return
        entered = {rank: ended[rank].entered if rank in ended else NEVER for rank in ranks}
        last = max(entered.values())
        expiries = {
            rank: ending.entered + step.actions[rank].timeout
            for rank, ending in ended.items()
            if step.actions[rank].way in ("call", "differ")
        }
        expiry = min(expiries.values())
        # A member may be killed before it has told others that its timeout has expired.
        reached = min(time for rank, time in expiries.items() if self.world.processes[rank].died > time + 1)
        absent = [time for rank, time in gone.items() if rank in ranks]
        cut = min((time for host, time in self.program.cuts.items() if self._spans(step.group, host)), default=NEVER)
        absent += [cut] if cut < NEVER else []
        # One that has come, and is gone then, is not waited for.
        early = [
            time
            for rank, time in gone.items()
            if rank in ranks and (time < entered[rank] or (rank in ended and step.actions[rank].way == "leave"))
        ]
        first_error = min([expiry + TOLERANCE, last, *early, *(entered[rank] for rank in failed)])
        start, end = min(entered.values()), max(ending.ended for ending in waiting.values())
        for rank, ending in waiting.items():
            extra = KEEPALIVE_SECONDS if self.program.cuts else 0.0
            # Without the store, and without connections, only its own timeout ends its wait.
            alone = ending.entered + step.actions[rank].timeout + TOLERANCE if self._is_beyond(rank) else 0.0
            took = ending.ended - max(ending.entered, first_error, alone)
            assert took < MOMENT + extra, f"rank {rank} needs {took} s"
        classes = {rank: self._class_of(rank, number, ending) for rank, ending in waiting.items()}
        # Which errors are possible, and whether one is certain.
        is_certain = bool(failed) or last == NEVER or bool(early)
        is_certain |= last > reached + TOLERANCE + SLACK or step.group in self._must_fail
        is_certain |= (
            cut < NEVER
            and len(self.program.cuts) == 1
            and all(
                any(entered[rank] > cut for rank in ranks if self._is_beyond(rank) is side) for side in (False, True)
            )
        )
        is_possible = is_certain or last > expiry - SLACK or any(time <= end for time in absent)
        good = "differ" if len({step.actions[rank].way for rank in ranks} - {"skip", "leave", "fail"}) > 1 else "agreed"
        if not is_possible:
            assert set(classes.values()) == {good}, f"{classes}, {self._errors(waiting)}"
        if is_certain:
            assert set(classes.values()) == {"error"}, f"{classes} without {failed}, {gone}, {last} > {expiry}"
        assert set(classes.values()) <= {good, "error"}, classes
        for rank, ending in waiting.items():
            if ending.error is not None and classes[rank] == "error":
                self._check_error(rank, number, ending.error, ending)
        if len(set(classes.values())) > 1:
            self._must_fail.add(step.group)
            dead = {rank for rank in ranks if start <= gone.get(rank, NEVER) <= end and rank not in left}
            for rank, found in classes.items():
                if found == "error" and not start <= cut <= end:
                    assert dead.intersection(self._path(step.group, rank)), (
                        f"{classes}, {self._errors(waiting)}; {dead} are dead, and not on the path of {rank}"
                    )
        kinds = {type(ending.error).__name__ for ending in waiting.values() if ending.error is not None}
        self.outcomes.update(kinds or {good})

    def _errors(self, waiting: dict[int, Ending]) -> set[str]:
        return {f"{type(ending.error).__name__}: {ending.error}" for ending in waiting.values()}

    def _class_of(self, rank: int, number: int, ending: Ending) -> str:
        step = self.program.steps[number]
        ranks = self.program.groups[step.group]
        if isinstance(ending.error, MismatchError):
            calls = [call_of(other, number, step.actions[other].way) for other in ranks]
            expected = str(mismatch_error(ranks, [call.details() for call in calls]))
            assert str(ending.error) == expected, f"{ending.error} instead of {expected}"
            return "differ"
        if ending.error is not None:
            return "error"
        verdict = ending.verdict
        assert verdict is not None
        assert verdict.outcome is Outcome.AGREED
        bodies = [body_of(other, number, step.body_bytes) for other in ranks]
        assert verdict.result == (b"".join(bodies) if step.combines else b""), "another result"
        if step.actions[rank].reads:
            assert [verdict.bodies[member] for member in range(len(ranks))] == bodies, "other bodies"
        return "agreed"

    def _check_error(self, rank: int, number: int, error: RankwiseError, ending: Ending) -> None:
        step, ended = self.program.steps[number], self.endings[number]
        ranks, gone = self.program.groups[step.group], self.gone[step.group]
        named = {int(found) for found in re.findall(r"rank (\d+)", str(error))}
        if isinstance(error, RemoteRankError):
            assert error.rank in ended, f"{error} names a rank that did not fail"
            assert step.actions[error.rank].way == "fail", f"{error} names a rank that did not fail"
        elif isinstance(error, CollectiveTimeoutError):
            entered = {other: ended[other].entered if other in ended else NEVER for other in ranks}
            failing = {other for other in ranks if step.actions[other].way == "fail" or gone.get(other, NEVER) < NEVER}
            failing |= self._unreachable(rank)
            if self.program.cuts:  # all had come, and the calls of some did not arrive: those that wait name a leader
                failing |= {first for other in ranks for first in self._path(step.group, other)}
                # Those that have the verdict, which did not arrive here, are known to have come once they wait again.
                failing |= {
                    other
                    for other, reached in ended.items()
                    if reached.error is None and self._entered_next(number, other) > ending.ended - UNSEEN
                }
            moments = [
                time + step.actions[other].timeout
                for other, time in entered.items()
                if time < NEVER and f"within {step.actions[other].timeout:g} s" in str(error)
            ]
            wanted = []
            for moment in sorted(set(moments)):
                if moment > ending.ended:
                    continue
                certain = {other for other, time in entered.items() if time > moment + TOLERANCE}
                possible = {
                    other for other in ranks if self._announces(step.group, other, entered, moment) > moment - UNSEEN
                }
                # Of two causes either may be named.
                if named and (named <= failing or certain - failing <= named <= possible | failing):
                    return
                wanted.append((moment, certain, possible))
            raise AssertionError(f"rank {rank}: {error}; at timeouts missing were {wanted}; entered: {entered}")
        else:
            assert type(error) is CollectiveError, repr(error)
            assert named, f"{error} names no rank"
            innocent = {other for other in named if gone.get(other, NEVER) > ending.ended} - self._unreachable(rank)
            assert not innocent, f"rank {rank}: {error} names {innocent}; gone are {gone}"

    def _entered_next(self, number: int, rank: int) -> float:
        """Return when a rank came to the next step of a group; `NEVER` if it did not."""
        group = self.program.steps[number].group
        later = zip(self.program.steps[number + 1 :], self.endings[number + 1 :], strict=True)
        return next((ended[rank].entered for step, ended in later if step.group == group and rank in ended), NEVER)

    def _is_beyond(self, rank: int) -> bool:
        """Return whether a rank is on a host that is cut off at some time."""
        return self.world.processes[rank].host in self.program.cuts

    def _spans(self, group: int, host: int) -> bool:
        """Return whether a group has members on a host and on others."""
        return len({self.world.processes[rank].host == host for rank in self.program.groups[group]}) > 1

    def _unreachable(self, rank: int) -> set[int]:
        """Return the ranks that a rank does not reach after hosts were cut off."""
        if not self.program.cuts:
            return set()
        if self._is_beyond(rank) and not self.program.has_pages:
            return set(range(len(self.program.hosts)))  # those of its host use the store as well
        return {
            process.rank
            for process in self.world.processes
            if process.host != self.world.processes[rank].host
            and (self._is_beyond(rank) or self._is_beyond(process.rank))
        }

    def _announces(self, group: int, rank: int, entered: dict[int, float], moment: float) -> float:
        """Return when the member has come that lets others know, at a moment, of one that waits."""
        unit = self.world.processes[rank].unit
        mates = (other for other in self.program.groups[group] if self.world.processes[other].unit == unit)
        first = next((other for other in mates if entered[other] < moment), rank)
        return max(entered[rank], entered[first])

    def _path(self, group: int, rank: int) -> Iterator[int]:
        """Return the ranks from one to the root: itself, and the leaders of its unit and of those above it."""
        ranks = self.program.groups[group]
        units: dict[int, list[int]] = {}
        for other in ranks:
            units.setdefault(self.world.processes[other].unit, []).append(other)
        numbers = list(units)
        unit: int | None = numbers.index(self.world.processes[rank].unit)
        while unit is not None:
            yield units[numbers[unit]][0]
            unit = Tree(len(numbers)).parent(unit)

    def _check_rest(self) -> None:
        """Check that nothing is left in the store, on boards and in inboxes of exchanges before the last agreement."""
        dead = any(process.died < NEVER for process in self.world.processes)
        for group in range(len(self.program.groups)):
            agreed = [
                ending.sequence
                for step, ended in zip(self.program.steps, self.endings, strict=True)
                for ending in ended.values()
                if step.group == group and ending.verdict is not None and ending.verdict.outcome is Outcome.AGREED
            ]
            last = max(agreed, default=0)
            if not dead and not self.program.cuts:
                notes = [key for key in self.world.store.data if key.startswith(f"note/{group}/")]
                assert all(int(key.split("/")[2]) >= last for key in notes), f"after exchange {last}: {notes}"
            for process in self.world.processes:
                if process.died < NEVER or group not in process.channels or process.channels[group].closed:
                    continue
                sequence = process.channels[group].sequence
                board = process.links.board
                kept = [key for key in board._notes if key[0] == group]
                assert len(kept) <= sequence - last + 2, f"rank {process.rank} keeps notes of {kept}"
                for peer in process.peers.values():
                    if group in peer.inboxes:
                        inbox = peer.inboxes[group]
                        for stored in (inbox.calls, inbox.verdicts, inbox.ends):
                            assert all(number >= sequence for number in stored), (
                                f"rank {process.rank} in exchange {sequence} keeps {stored.keys()} of {peer.name}"
                            )


def check_random(seed: int, faults: Sequence[str], *, num_faults: int, max_hosts: int = 24) -> Counter[str]:
    """Run a random program, and compare with the contract."""
    generator = random.Random(seed)  # noqa: S311 - to be repeated
    program = random_program(generator, faults, num_faults=num_faults, max_hosts=max_hosts)
    try:
        world, endings = run(program, generator.randrange(1 << 30))
        oracle = Oracle(program, world, endings)
        oracle.check()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}\n{program}") from error
    return oracle.outcomes


def check_many(seed: int, faults: Sequence[str], *, num_faults: int, runs: int) -> Counter[str]:
    """Run random programs, and return how often their steps ended in each way."""
    outcomes: Counter[str] = Counter()
    for number in range(runs):
        outcomes += check_random(seed * runs + number, faults, num_faults=num_faults)
    return outcomes


def record_of(member: int) -> Calls:
    return Calls.of(member, Description("barrier", site="train.py:88").frame())


def exchange_of(unit: int, inboxes: dict[int, Inbox]) -> Exchange:
    """Return the first exchange of a leader of a unit of two, whose own members have all come."""
    exchange = Exchange(0, 1, ranks=range(2), unit=unit, tree=Tree(2), inboxes=inboxes, combine=None)
    exchange.add_own([record_of(unit)])
    return exchange


def test_errors_of_members_that_have_sent_no_call_are_final() -> None:
    """Also that of a deadlock, which is a `CollectiveError` as those of lost members and of timeouts are."""
    final = [RemoteRankError(rank=1, host="", raised="ValueError", traceback=""), MismatchError("deadlock")]
    others = [CollectiveError("rank 1 is gone"), CollectiveTimeoutError("rank 1 did not come")]
    assert [Verdict(Outcome.ERROR, error=error).is_final for error in (*final, *others)] == [True, True, False, False]


def test_the_root_does_not_agree_after_an_end_that_came_behind_the_calls() -> None:
    error = CollectiveTimeoutError("rank 0 did not come")
    inbox = Inbox()
    inbox.store(Frame(FrameKind.CALLS, "", body=encode_calls([record_of(1)]), sequence=1))
    inbox.store(Frame(FrameKind.ENDED, "", body=pickle.dumps(error), sequence=1))
    exchange = exchange_of(0, {1: inbox})
    verdict = exchange.step(0.0)
    assert verdict is not None
    assert str(verdict.error) == str(error)
    ((unit, frame),) = exchange.take_outgoing()
    assert (unit, frame.kind) == (1, FrameKind.VERDICT)


@pytest.mark.parametrize("agrees", [True, False])
def test_a_leader_that_ends_an_exchange_waits_for_the_verdict_of_the_root(agrees: bool) -> None:
    inbox = Inbox()
    exchange = exchange_of(1, {0: inbox})
    assert exchange.step(0.0) is None
    exchange.end(CollectiveTimeoutError("rank 0 did not come"), 1.0)
    assert exchange.step(1.1) is None
    assert [frame.kind for _, frame in exchange.take_outgoing()] == [FrameKind.CALLS, FrameKind.ENDED]
    if agrees:
        inbox.store(Frame(FrameKind.VERDICT, "", body=Verdict(Outcome.AGREED).encode(), sequence=1))
    verdict = exchange.step(1.2 if agrees else 1.1 + GRACE_SECONDS)
    assert verdict is not None
    assert verdict.outcome is (Outcome.AGREED if agrees else Outcome.ERROR)


@pytest.mark.soak(100)
def test_members_that_come_agree(seed: int) -> None:
    assert check_many(seed, FAULTS, num_faults=0, runs=30).keys() == {"agreed"}


@pytest.mark.soak(100)
def test_one_fault_has_the_same_outcome_for_all(seed: int) -> None:
    outcomes = check_many(1_000_000 + seed, FAULTS, num_faults=1, runs=100)
    assert {
        "agreed",
        "CollectiveError",
        "CollectiveTimeoutError",
        "RemoteRankError",
        "MismatchError",
    } <= outcomes.keys()


@pytest.mark.soak(100)
def test_two_faults_have_the_same_outcome_for_all(seed: int) -> None:
    check_many(2_000_000 + seed, FAULTS, num_faults=2, runs=70)


@pytest.mark.soak(100)
def test_a_host_that_is_cut_off_names_the_others_and_they_name_it(seed: int) -> None:
    check_many(3_000_000 + seed, [*FAULTS, *["cut"] * 10], num_faults=1, runs=40)


def program_of(hosts: list[int], *steps: dict[int, Action], **more: dict[int, float]) -> Program:
    """Return a program of one group of all ranks; those that a step does not name make the call at once."""
    everyone = list(range(len(hosts)))
    return Program(
        hosts=hosts,
        groups=[everyone],
        steps=[Step(group=0, actions={rank: step.get(rank, Action()) for rank in everyone}) for step in steps],
        kills=more.get("kills", {}),
    )


def checked(program: Program) -> tuple[World, list[dict[int, Ending]]]:
    """Run a program, and compare with the contract."""
    world, endings = run(program, 0)
    Oracle(program, world, endings).check()
    return world, endings


def test_no_note_is_left_after_a_slow_call() -> None:
    world, _ = checked(program_of([0, 0, 1, 1], {3: Action(wait=2.0)}, {}, {}))
    assert not world.store.data


def test_a_follower_whose_timeout_expires_names_the_missing_rank_of_another_host() -> None:
    """It knows only its host, where all have come; it must not name its leader."""
    step = {rank: Action(timeout=2.0) for rank in range(3)} | {0: Action(wait=0.5), 3: Action(wait=5.0)}
    _, (endings,) = checked(program_of([0, 0, 1, 1], step))
    for ending in endings.values():
        assert re.findall(r"rank (\d+)", str(ending.error)) == ["3"]


def test_a_follower_whose_timeout_expires_names_a_lost_rank_that_had_come() -> None:
    step = {2: Action(wait=1.0, timeout=0.5)}
    _, (endings,) = checked(program_of([0, 1, 1, 1], step, kills={0: 0.9}))
    assert re.findall(r"rank (\d+)", str(endings[1].error)) == ["0"]


def test_inboxes_of_a_leader_that_fails_keep_nothing() -> None:
    checked(program_of([0, 1, 2], {}, {1: Action(way="fail")}))


def test_a_member_without_a_leader_ends_soon_after_the_loss_of_a_rank_elsewhere() -> None:
    program = program_of([0, 1, 1, 2], {1: Action(wait=50.0), 3: Action(wait=3.0)}, kills={3: 1.0})
    _, (endings,) = checked(program)
    assert endings[2].ended < 5
    assert "rank 3 is gone" in str(endings[2].error)


def test_many_missing_members_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_of("channel"), "_NAMED_EACH", 16)
    absent = {rank: Action(way="skip") for rank in (*range(20), 63)}
    hosts = [rank // 8 for rank in range(64)]
    _, (endings,) = run(program_of(hosts, {rank: absent.get(rank, Action(timeout=1.0)) for rank in range(64)}), seed=0)
    for rank in range(20, 63):
        assert "Missing: each of ranks 0-19, 63, which has made no call of this group yet." in str(endings[rank].error)


def test_members_that_have_agreed_are_not_named_by_those_that_the_verdict_did_not_reach() -> None:
    """The host of the root is cut off while it sends the verdict."""
    num_ranks, num_split = 24, 0
    calls = {rank: Action(timeout=3.0) for rank in range(num_ranks)}
    for number in range(6):
        program = program_of([rank // 2 for rank in range(num_ranks)], calls, calls, calls)
        program.steps[1].actions = {rank: Action(wait=0.5, timeout=3.0) for rank in range(num_ranks)}
        program.cuts = {0: 0.5095 + 0.0005 * number}
        _, (_, endings, _) = run(program, seed=19 + number)
        errors = [str(ending.error) for ending in endings.values() if ending.error is not None]
        num_split += 0 < len(errors) < num_ranks
        assert all(set(re.findall(r"rank (\d+)", error)) == {"0", "1"} for error in errors)
    assert num_split >= 3


def test_the_messages_of_a_call_are_two_for_each_host() -> None:
    for num_ranks in (2, 8, 16, 64, 512):
        found = cost(num_ranks, 8)
        assert found.messages == 2 * (max(1, num_ranks // 8) - 1)
        assert found.connections <= FAN_OUT + 1
        assert found.store_operations == 0


@pytest.mark.slow
def test_many_ranks_agree_and_notice_the_end_of_one() -> None:
    num_ranks = 4096
    hosts = [rank // 8 for rank in range(num_ranks)]
    killed = num_ranks // 2
    second = {rank: Action(wait=0.5) for rank in range(num_ranks)}
    program = program_of(hosts, {}, second, kills={killed: 0.3})
    _, (agreed, failed) = checked(program)
    assert all(ending.error is None for ending in agreed.values())
    assert len(failed) == num_ranks - 1
    assert all(f"rank {killed} is gone" in str(ending.error) for ending in failed.values())
