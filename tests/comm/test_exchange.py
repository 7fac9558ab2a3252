"""Exchanges over a simulated network: random delays, ends, failures and timeouts, each run again by its seed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rankwise._comm.control.exchange import FAN_OUT, MAX_STAR_SIZE, Tree
from rankwise._comm.control.verdict import Outcome
from rankwise.errors import CollectiveError, CollectiveTimeoutError, MismatchError, RemoteRankError
from tests.comm.simulation import NEVER, Plan, Simulation

SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 40)
# How many random exchanges a run of a test has.
RUNS = 100
LONGEST_DELAY = 0.02


def hosts_of(size: int, ranks_per_host: int) -> list[str]:
    """Return the host of each member."""
    return [f"host{member // ranks_per_host}" for member in range(size)]


def simulated(plans: list[Plan], generator: random.Random, *, longest_delay: float = LONGEST_DELAY) -> Simulation:
    """Run an exchange on hosts of a random size until nothing happens any more."""
    hosts = hosts_of(len(plans), generator.choice([1, 2, 3, 8]))
    if generator.random() < 0.3:
        generator.shuffle(hosts)
    simulation = Simulation(plans, hosts, seed=generator.randrange(1 << 30), longest_delay=longest_delay)
    simulation.run(1000.0)
    return simulation


def test_the_tree_has_each_member_once() -> None:
    """Each below its parent, and the leaders of hosts at most so many below one."""
    for size, ranks_per_host in [(1, 1), (2, 1), (6, 3), (64, 8), (1000, 8), (1000, 1), (400, 400)]:
        hosts = hosts_of(size, ranks_per_host)
        trees = [Tree(own, hosts) for own in range(0, size, max(1, size // 50))]
        parents = trees[0].parents
        assert parents[0] == 0
        for tree in trees:
            assert tree.below[tree.own] == sorted({tree.own}.union(*(tree.below[child] for child in tree.children)))
            assert sum(map(len, tree.below.values())) == 2 * len(tree.below[tree.own]) - 1
            if size > MAX_STAR_SIZE:
                others = [child for child in tree.children if hosts[child] != hosts[tree.own]]
                assert len(others) <= FAN_OUT
            for child in tree.children:
                assert all(tree.source(member) == child for member in tree.below[child])
        assert trees[0].below[0] == list(range(size))


@pytest.mark.soak(100)
def test_members_that_come_agree(seed: int) -> None:
    generator = random.Random(seed)  # noqa: S311 - to be repeated
    for _ in range(RUNS):
        size = generator.choice(SIZES)
        plans = [Plan(enters=generator.uniform(0, 0.2), leaves=generator.random() < 0.5) for _ in range(size)]
        simulation = simulated(plans, generator)
        bodies = {member: bytes([member]) for member in range(size)}
        for member in simulation.members:
            assert member.verdict is not None
            assert (member.verdict.outcome, member.verdict.error) == (Outcome.AGREED, None)
            assert member.verdict.result == bytes(range(size))
            assert member.verdict.bodies == bodies


@pytest.mark.soak(100)
def test_different_calls_and_failures_reach_all(seed: int) -> None:
    generator = random.Random(seed)  # noqa: S311 - to be repeated
    for _ in range(RUNS):
        size = generator.choice(SIZES)
        odd = generator.sample(range(size), generator.randint(1, size - 1))
        is_failure = generator.random() < 0.5
        plans = [
            Plan(
                enters=generator.uniform(0, 0.2),
                fails=is_failure and own in odd,
                differs=own in odd,
                leaves=generator.random() < 0.5,  # because of the failure, which others hear of later
            )
            for own in range(size)
        ]
        for number, member in enumerate(simulated(plans, generator).members):
            if is_failure and number in odd:
                continue
            assert member.verdict is not None
            error = member.verdict.error
            if is_failure:
                assert isinstance(error, RemoteRankError), error
                assert error.rank in odd
            else:
                assert isinstance(error, MismatchError), error


@pytest.mark.soak(100)
def test_at_a_timeout_all_have_the_same_outcome(seed: int) -> None:
    """Whoever is late or impatient, and whenever: also where the last member comes at the moment of the timeout."""
    generator = random.Random(seed)  # noqa: S311 - to be repeated
    outcomes: Counter[bool] = Counter()
    for _ in range(RUNS):
        size = generator.choice(SIZES)
        plans = [Plan(enters=generator.uniform(0, 0.3)) for _ in range(size)]
        late, impatient = generator.sample(range(size), 2)
        plans[impatient].timeout = generator.uniform(0.2, 0.5)
        moment = plans[impatient].enters + plans[impatient].timeout
        plans[late].enters = moment + generator.choice([generator.uniform(-2, 1) * LONGEST_DELAY, 2.0])
        simulation = simulated(plans, generator)
        verdicts = [member.verdict for member in simulation.members]
        assert None not in verdicts
        errors = {type(verdict.error) for verdict in verdicts if verdict is not None}
        assert errors in ({type(None)}, {CollectiveTimeoutError}), (plans, verdicts)
        outcomes[errors == {type(None)}] += 1
        for error in {str(verdict.error) for verdict in verdicts if verdict is not None and verdict.error is not None}:
            missing = [int(number) for number in error.removeprefix("missing: [").removesuffix("]").split(", ")]
            assert late in missing, (error, plans)
            # One that came in time had announced itself by then.
            assert all(plans[other].enters > moment - 0.1 for other in missing), (error, plans)
    assert min(outcomes[True], outcomes[False]) > 0, outcomes


@pytest.mark.soak(300)
def test_the_end_of_members_is_noticed_by_all_that_wait(seed: int) -> None:
    """No survivor waits until its timeout, and none names a member that lives."""
    generator = random.Random(seed)  # noqa: S311 - to be repeated
    for _ in range(RUNS):
        size = generator.choice(SIZES)
        plans = [Plan(enters=generator.uniform(0, 0.3)) for _ in range(size)]
        dead = generator.sample(range(size), generator.randint(1, max(1, size // 3)))
        for plan in [plans[number] for number in dead]:
            plan.enters = generator.choice([0.0, plan.enters, NEVER])
            plan.dies = generator.uniform(0, 0.4)
        simulation = simulated(plans, generator)
        for number, member in enumerate(simulation.members):
            if number in dead:
                continue
            assert member.verdict is not None, (number, plans)
            assert member.ended < 2.0, (number, member.ended, plans)
            error = member.verdict.error
            if error is not None:
                assert type(error) is CollectiveError, error
                named = [int(part.split()[1]) for part in str(error).split("; ")]
                assert set(named) <= set(dead), (error, plans)
            elif any(plans[other].enters == NEVER for other in dead):
                raise AssertionError(f"rank {number} agrees without {dead}: {plans}")


def test_a_member_that_leaves_after_the_exchange_is_not_missed() -> None:
    """Its verdict reaches others later than its farewell."""
    for seed in range(50):
        plans = [Plan(leaves=True) for _ in range(9)]
        simulation = simulated(plans, random.Random(seed), longest_delay=1.0)  # noqa: S311 - to be repeated
        assert all(member.verdict is not None and member.verdict.error is None for member in simulation.members)


def test_the_number_of_frames_grows_with_the_number_of_members() -> None:
    """Each member sends its frame once, and gets one verdict, with the bodies that it reads."""
    for size in (2, 8, 64, 256):
        simulation = Simulation([Plan()] * size, hosts_of(size, 8), seed=0, longest_delay=0.0)
        simulation.run(1.0)
        assert simulation.num_sent == 2 * (size - 1)
