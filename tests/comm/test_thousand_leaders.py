"""A thousand leaders of hosts over real connections, in one process.

Connections, boards and witnesses are those of the package. The channels are the copies of the simulation, which give
the seconds where they would wait: so one thread runs all leaders, each when its event loop has an event.
"""

from __future__ import annotations

import heapq
import resource
import select
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import pytest
from torch.distributed import HashStore

from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.peer import Peer
from rankwise._comm.control.links.places import Hosts, Places, Units
from rankwise._comm.control.protocol import Description
from rankwise._comm.control.tree import FAN_OUT, Tree
from rankwise._comm.control.verdict import Outcome
from rankwise.errors import CollectiveError, MismatchError
from tests.comm import simulation

SIZE = 1000
# Sockets, event loops and pairs to wake them: of each leader.
DESCRIPTORS = 12
# How long a leader may be interrupted by another thread before it is noticed.
PAUSE = 0.02

# What gives the seconds to wait.
Program = Generator[float, None, Any]


class DrivenLinks(Links):
    """The connections of a leader, whose waits are the driver's."""

    def wait(self, peers: Iterable[Peer], seen: int, seconds: float) -> Program:  # type: ignore[override]
        for peer in peers:
            self.update_interest(peer)
        if not self.connector.wait(seen, 0.0):
            yield seconds
            self.connector.wait(seen, 0.0)
        return self.loop.num_events != seen

    def connect(self) -> Program:
        """Connect to the neighbours in the tree, and let a thread watch them."""
        neighbours = Tree(SIZE).neighbours(self.units.of(self.rank))
        self.listen()
        peers = [self.peer(self.units.leader(unit)) for unit in neighbours]
        while not all(peer.is_connected for peer in peers):
            yield from self.wait(peers, self.loop.num_events, PAUSE)
        self.watch(peers)


class Leader:
    """One leader: its connections, and its channel of the group of all."""

    def __init__(self, links: DrivenLinks) -> None:
        self.links = links
        self.channel = simulation.copy_of("socket_channel").SocketChannel(0, range(SIZE), links)

    def agree(self, operation: str = "all_reduce") -> Program:
        """Take part in an exchange; returns the verdict."""
        call = Description(operation, site="train.py:88")
        program: Program = self.channel.agree(call, b"", timeout=100.0, on_pause=lambda _: None)
        return program


def run(links: Sequence[Links], programs: dict[int, Program]) -> dict[int, Any]:
    """Run programs of leaders at the same time; return the result or error of each."""
    results: dict[int, Any] = {}
    poller, number_of = select.epoll(), {links[number].loop.fileno(): number for number in programs}
    seen: dict[int, int] = {}
    due: list[tuple[float, int]] = []
    until: dict[int, float] = {}
    deadline = time.monotonic() + 200

    def resume(number: int) -> None:
        simulation.clock.now = time.monotonic()
        seen[number] = links[number].loop.num_events
        try:
            until[number] = time.monotonic() + abs(next(programs[number]))
        except StopIteration as ended:
            results[number] = ended.value
        except CollectiveError as error:
            results[number] = error
        else:
            heapq.heappush(due, (until[number], number))
            return
        poller.unregister(links[number].loop.fileno())
        until.pop(number, None)

    with poller:
        for descriptor, number in number_of.items():
            poller.register(descriptor, select.EPOLLIN)
            resume(number)
        while until:
            assert time.monotonic() < deadline, len(until)
            ready = {number_of[descriptor] for descriptor, _ in poller.poll(PAUSE)}
            ready.update(number for number in until if links[number].loop.num_events != seen[number])
            while due and due[0][0] <= time.monotonic():
                moment, number = heapq.heappop(due)
                if until.get(number) == moment:
                    ready.add(number)
            for number in ready:
                resume(number)
    return results


@pytest.fixture
def links() -> Iterator[list[DrivenLinks]]:
    """The connections of all leaders, which are made."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < SIZE * DESCRIPTORS:
        pytest.skip(f"the hard limit of file descriptors (ulimit -Hn) is {before[1]}, below {SIZE * DESCRIPTORS}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], SIZE * DESCRIPTORS), before[1]))
    names = tuple(f"node{number}" for number in range(SIZE))
    hosts = Hosts(names, "0" * SIZE, (1,) * SIZE, tuple(range(SIZE)))
    units, store = Units(Places(range(SIZE), hosts), [False] * SIZE), HashStore()
    made: list[DrivenLinks] = []
    try:
        for rank in range(SIZE):
            own = DrivenLinks(rank, units=units, page=None, store=store, secret=None, own_address=lambda: "127.0.0.1")
            made.append(own)
        run(made, {rank: own.connect() for rank, own in enumerate(made)})
        yield made
    finally:
        for own in made:
            own.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
def test_a_thousand_leaders_agree_differ_and_lose_one(links: list[DrivenLinks]) -> None:
    numbers = [len(own._peers) for own in links]
    assert max(numbers) == 1 + FAN_OUT
    assert sum(numbers) == 2 * (SIZE - 1), "a tree"
    leaders = [Leader(own) for own in links]

    def all_run(program: Callable[[Leader], Program], without: Sequence[int] = ()) -> dict[int, Any]:
        return run(links, {number: program(each) for number, each in enumerate(leaders) if number not in without})

    for _ in range(3):
        verdicts = all_run(Leader.agree)
        assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.AGREED}

    odd = leaders[613]
    verdicts = all_run(lambda leader: leader.agree("broadcast" if leader is odd else "all_reduce"))
    for verdict in verdicts.values():
        assert isinstance(verdict.error, MismatchError)
        assert "all_reduce() on ranks 0-612, 614-999, broadcast() on rank 613" in str(verdict.error)
        assert "train.py:88" in str(verdict.error)

    killed = 37  # it has a leader above it, and leaders below it
    for peer in links[killed]._peers.values():
        assert peer.connection is not None
        peer.connection.close()
    verdicts = all_run(Leader.agree, without=[killed])
    assert len(verdicts) == SIZE - 1
    for verdict in verdicts.values():
        error = verdict if isinstance(verdict, CollectiveError) else verdict.error
        assert f"rank {killed} on node{killed} is gone" in str(error)
    for leader in leaders:
        leader.channel.close("the test has ended")
