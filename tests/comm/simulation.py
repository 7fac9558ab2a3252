"""Simulated ranks, without threads, sockets or a clock: they run the code of the channels, over what is simulated here.

Of the package, all modules of a channel run as they are, but for the two lowest layers: connections (`Links`, `Peer`),
and the memory and descriptors of a page. In a copy of these modules each function that waits is made a generator, by
`_Suspending`: where it would wait, it gives the seconds to the simulation, which goes on with another rank. So one step
of a rank is what it does between two waits; it may be killed in the middle, at a fence, or when it writes to the store
or to a connection.

- Connections: frames take a random time, and arrive in the order in which they were sent over the same connection. The
  end of a connection comes behind them; of a rank that dies, the last ones may be lost.
- The store: what is set may be seen later than the number that was counted for it.
- The page: the real `Window`, in memory of this process. Wake-ups, and the ends of ranks of the host, take a moment.
- The witnesses of lost ranks write them on the board after a moment.
"""

from __future__ import annotations

import ast
import builtins
import gc
import heapq
import importlib.util
import mmap
import pickle
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from rankwise._comm.control.exchange import Inbox
from rankwise._comm.control.page.layout import window_bytes
from rankwise._comm.control.page.window import Window
from rankwise._comm.control.protocol import Description, Frame, FrameKind, pop_frame
from rankwise._comm.control.tree import Tree
from rankwise._comm.control.verdict import Verdict
from rankwise._text import ranks_text
from rankwise.errors import RankwiseError, RemoteRankError

CONTROL: Final = "rankwise._comm.control"
CLOSED: Final = "is gone: its connection closed, so it was killed or exited without cleanup"
NEVER: Final = float("inf")
# How long a rank that is cut off is not known to be lost.
KEEPALIVE_SECONDS: Final = 10.0

# What a generator gives: the seconds to wait, negative if no event ends the wait.
Waits = Generator[float, None, Any]

_COPIED: Final = ("board", "branch", "channel", "page_channel", "hosts_channel", "socket_channel")
_WAITING: Final = {
    *("agree", "_exchange", "_lead", "_follow", "_wait", "_sleep", "_give_up", "_end_for_all"),
    *("run", "wait", "_wait_as_leader", "_verdict_of_others", "sleep"),
}


class Clock:
    """Stands for the module `time`.

    Attributes:
        now: The time of the rank that runs.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> Waits:
        yield -seconds

    def elapsed_since(self, start: float) -> float:
        return self.now - start


clock: Final = Clock()


class Killed(BaseException):
    """The rank that runs is killed."""


class _Suspending(ast.NodeTransformer):
    """Makes generators of the functions that wait."""

    def __init__(self) -> None:
        self._is_waiting = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self._is_waiting = self._is_waiting, node.name in _WAITING
        self.generic_visit(node)
        if self._is_waiting:  # a generator, also if it waits in another class only
            node.body.append(ast.Expr(ast.YieldFrom(ast.Tuple([], ast.Load()))))
        self._is_waiting = outer
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node  # it returns the generator, to a function that waits

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return ast.copy_location(ast.YieldFrom(node), node) if self._is_waiting and name in _WAITING else node


@cache
def copies() -> dict[str, ModuleType]:
    """Return the copies of the modules that wait, or that look at the clock."""
    found: dict[str, ModuleType] = {
        "time": clock,  # type: ignore[dict-item]  # it stands for the module
        "rankwise._net.pausable_timeouts": SimpleNamespace(elapsed_since=clock.elapsed_since),  # type: ignore[dict-item]
    }
    for name, attributes in {
        "links.links": ["Links"],
        "links.peer": ["Peer"],
        "links.socket_flow": ["SocketFlow"],
        "page.host_page": ["HostPage"],
        "page.meeting": ["PageMeeting"],
        "page.pipes": ["Pipes"],
    }.items():
        found[f"{CONTROL}.{name}"] = SimpleNamespace(CLOSED=CLOSED, **dict.fromkeys(attributes))  # type: ignore[assignment]

    def import_copy(name: str, *args: Any) -> Any:
        return found[name] if name in found else __import__(name, *args)

    for name in _COPIED:
        specification = importlib.util.find_spec(f"{CONTROL}.{name}")
        assert specification is not None
        path = str(specification.origin)
        module = ModuleType(f"simulated.{name}")
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": import_copy}
        found[f"{CONTROL}.{name}"] = sys.modules[module.__name__] = module  # where dataclasses look
        tree = ast.fix_missing_locations(_Suspending().visit(ast.parse(Path(path).read_text())))
        exec(compile(tree, path, "exec"), vars(module))  # noqa: S102 - a module of the package
    vars(found[f"{CONTROL}.channel"])["_NAMED_EACH"] = 1 << 20  # so that errors are easily compared
    return found


def copy_of(module: str) -> Any:
    """Return the copy of a module of the package."""
    return copies()[f"{CONTROL}.{module}"]


@contextmanager
def _few_collections() -> Iterator[None]:
    """Let the garbage collector rest in a block: with many ranks it has many objects to look at, and finds nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _shared_units() -> Iterator[None]:
    """Let all ranks that open a group, in a block, find its units only once: with many ranks that takes a moment."""
    user = copy_of("branch")
    real = user.units_of
    found: list[Any] = []

    def units_of(*arguments: Any) -> Any:
        if not found:
            found.append(real(*arguments))
        return found[0]

    user.units_of = units_of
    try:
        yield
    finally:
        user.units_of = real


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long things take, in seconds; each between nothing and so long if they are random.

    Attributes:
        hop: A frame, on its way to another host.
        wake: To wake a rank of the same host.
        frame: Work of a rank for each frame that it sends or receives.
        step: Its work for each step.
        store: An operation of the store.
        end: Until the end of a rank is noticed.
        is_random: They are random, and otherwise as they are here.
    """

    hop: float = 0.003
    wake: float = 0.001
    frame: float = 0.0
    step: float = 0.0
    store: float = 0.002
    end: float = 0.05
    is_random: bool = True


class Store:
    """The store that all ranks share."""

    def __init__(self, world: World) -> None:
        self.data: dict[str, Any] = {}
        self.num_operations = 0
        self.num_bytes = 0
        self._world = world

    def add(self, key: str, amount: int) -> int:
        self._work()
        self.data[key] = self.data.get(key, 0) + amount
        return int(self.data[key])

    def set(self, key: str, value: bytes) -> None:
        world, own = self._world, self._world.running
        self._work()
        self.num_bytes += len(value)

        def write() -> None:
            if own.died > world.now:
                self.data[key] = value

        world.at(own.now, write)

    def check(self, keys: Sequence[str]) -> bool:
        self._work()
        return all(key in self.data for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._work()
        values = [self.data[key] for key in keys]  # the real one waits for what is missing
        self.num_bytes += sum(map(len, values))
        return values

    def delete_key(self, key: str) -> bool:
        self._work()
        return self.data.pop(key, None) is not None

    def _work(self) -> None:
        world, own = self._world, self._world.running
        own.operate()
        self.num_operations += 1
        if world.is_cut_off(own):
            raise RuntimeError("the store does not answer")
        own.spend(world.time_of(world.costs.store))


class Peer:
    """The connection of a rank to another one, as the first one sees it."""

    def __init__(self, own: Process, other: Process) -> None:
        self.rank = other.rank
        self.name = f"rank {other.rank}"
        self.lost_reason = ""
        self.num_unsent = 0
        self.arrived: list[Frame | str] = []  # what can be read: frames, or at last why no more come
        self._own, self._other = own, other
        self._inboxes: dict[int, Inbox] = {}
        self._forgotten: set[int] = set()

    def inbox(self, group: int) -> Inbox:
        return self._inboxes.setdefault(group, Inbox())

    @property
    def inboxes(self) -> Mapping[int, Inbox]:
        """The inboxes, by group."""
        return self._inboxes

    def post(self, frame: Frame) -> None:
        if not self.lost_reason:
            self._own.operate()
            self._own.world.deliver(self._own, self._other, frame.encode())

    def receive(self) -> None:
        arrived, self.arrived = self.arrived, []
        for item in arrived:
            if isinstance(item, str):
                self.lost_reason = item
            elif item.group not in self._forgotten:
                self._own.spend(self._own.world.costs.frame)
                self.inbox(item.group).store(item)

    def forget(self, group: int) -> None:
        self._inboxes.pop(group, None)
        self._forgotten.add(group)


class Loop:
    """The event loop of a rank."""

    def __init__(self, own: Process) -> None:
        self.num_events = 0
        self._own = own

    def wait(self, seen: int, seconds: float) -> Waits:
        self.handle()
        if self.num_events == seen and seconds > 0:
            yield seconds
            self.handle()
        return self.num_events != seen

    def handle(self) -> None:
        """Handle the events that have occurred."""
        own = self._own
        if own.has_news:
            own.has_news = False
            self.num_events += 1
            own.page.dead.update(own.ends)
            for peer in own.peers.values():
                peer.receive()

    def interrupt(self) -> None:
        self.num_events += 1


def answered(task: Callable[[], object]) -> None:
    """Do what the thread of a board does, at once."""
    with suppress(RuntimeError):
        task()


class Links:
    """The connections of a rank."""

    same_host = False
    recorder = None
    closed = False

    def __init__(self, own: Process, store: Store) -> None:
        self.rank = own.rank
        self.loop = Loop(own)
        self.page = own.page
        self.channels: dict[int, Any] = {}
        self.board = copy_of("board").Board(store)
        self.board._submit = answered  # in place of its thread
        self.wait_note = SimpleNamespace(write=lambda *_: None)
        self._own = own
        self._world = own.world

    def host(self, rank: int) -> str:
        return str(self._world.processes[rank].host)

    def unit_of(self, rank: int) -> int:
        return self._world.processes[rank].unit

    def peer(self, rank: int) -> Peer:
        return self._own.peer(rank)

    def listen(self) -> None:
        pass

    def receive(self, peer: Peer) -> None:
        peer.receive()

    def wait(self, _: Iterable[Peer], seen: int, seconds: float) -> Waits:
        return self.loop.wait(seen, seconds)

    def lost_reason(self, rank: int) -> str:
        peer = self._own.peers.get(rank)
        return "" if peer is None else peer.lost_reason

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def names(self, ranks: Sequence[int]) -> str:
        return self.name(ranks[0]) if len(ranks) == 1 else f"each of {ranks_text(ranks)}"

    def ongoing_calls(self, _: int) -> list[Any]:
        return []

    def open_channel(self, group: int, channel: Any) -> None:
        self.channels[group] = channel

    def close_channel(self) -> None:
        pass

    def leave_group(self, group: int) -> None:
        for peer in self._own.peers.values():
            peer.forget(group)


class _Memory:
    """The memory of a page, of which each window is as long as its group needs."""

    def __init__(self) -> None:
        self._windows: dict[int, mmap.mmap] = {}
        self._behind: dict[int, bytes] = {}
        self.num_members: dict[int, int] = {}

    def open_window(self, number: int) -> memoryview:
        if number not in self._windows:
            self._windows[number] = mmap.mmap(-1, window_bytes(self.num_members[number]))
        return memoryview(self._windows[number])

    def close_window(self, number: int) -> None:
        pass

    def window_offset(self, number: int) -> int:
        return -1 - number

    def read(self, offset: int, length: int) -> bytes:
        # What is written at the start of an entry may be longer than a frame, whose rest is read from its middle.
        for start, data in self._behind.items():
            if start <= offset < start + max(1, len(data)):
                return data[offset - start : offset - start + length].ljust(length, b"\0")
        return bytes(length)

    def write(self, offset: int, data: bytes) -> None:
        self._behind[offset] = bytes(data)

    def free(self, offset: int, length: int) -> None:
        for start in [start for start in self._behind if offset <= start < offset + length]:
            del self._behind[start]


class _Window(Window):
    """A window of a rank that may be killed at a fence."""

    def __init__(self, own: Process, memory: Any, number: int, num_members: int) -> None:
        super().__init__(memory, number, num_members)
        self._own = own

    def fence(self) -> None:
        self._own.operate()


class Page:
    """The page of a host, as one of its ranks sees it."""

    spin_seconds = 0.0
    shares_tensors = False

    def __init__(self, own: Process, ranks: Sequence[int], memory: _Memory) -> None:
        self.ranks = ranks
        self.dead: set[int] = set()
        self._own = own
        self._memory = memory

    def attach(self, group: int, num_members: int) -> Window:
        self._memory.num_members[group] = num_members
        return _Window(self._own, self._memory, group, num_members)

    def detach(self, window: Window, num_members: int) -> None:
        pass  # it stays: ranks that have left later write there that they have

    def wake(self, index: int) -> None:
        world = self._own.world
        world.num_wakes += 1
        world.notify(world.processes[self.ranks[index]], self._own.now + world.time_of(world.costs.wake))


class Process:
    """A rank.

    Attributes:
        rank, host: Its rank and host.
        unit: The number of the ranks with which it shares a page.
        died: When it was killed.
        peers: Its connections.
        ends: The indices in the page of ranks of its host whose end can be noticed.
        channels: Its channels, by group.
        busy_until: The end of its last step.
        has_news: Something has occurred that its loop has not handled.
        operations_left: After so many more operations it is killed.
        is_done: Its program has ended.
    """

    def __init__(self, world: World, rank: int, host: int, mates: Sequence[int], memory: _Memory) -> None:
        self.world = world
        self.rank, self.host = rank, host
        self.unit = host
        self.died = NEVER
        self.peers: dict[int, Peer] = {}
        self.ends: set[int] = set()
        self.channels: dict[int, Any] = {}
        self.busy_until = 0.0
        self.has_news = False
        self.operations_left = -1
        self.is_done = True
        self.page = Page(self, mates, memory)
        self.links = Links(self, world.store)
        self._program: Waits | None = None
        self._waits = 0  # the number of the wait that it is in
        self._is_waiting = False

    @property
    def now(self) -> float:
        """Its own time, while it runs."""
        return clock.now

    def peer(self, rank: int) -> Peer:
        """Return the connection to another rank, which is made if there is none."""
        if rank not in self.peers:
            other = self.world.processes[rank]
            self.peers[rank] = Peer(self, other)
            other.peers[self.rank] = Peer(other, self)
        return self.peers[rank]

    def operate(self) -> None:
        """Do something that others can see; a rank that is to be killed may be killed before."""
        if self.died < NEVER:
            raise Killed
        if self.operations_left == 0:
            self.died = self.now
            raise Killed
        self.operations_left -= 1

    def spend(self, seconds: float) -> None:
        """Let time pass for this rank."""
        clock.now += seconds

    def start(self, program: Waits) -> None:
        """Run a program."""
        self._program, self.is_done = program, False
        self._is_waiting = True
        self.wake()

    def close(self) -> None:
        """End the program, if it has not ended."""
        if self._program is not None:
            with suppress(Killed):
                self._program.close()

    def wake(self) -> None:
        """Go on after something has occurred."""
        if self._is_waiting:
            number = self._waits
            self.world.at(max(self.busy_until, self.world.now), lambda: self.step(number))

    def step(self, number: int) -> None:
        """Go on, if it is still in the wait with that number."""
        program = self._program
        if number != self._waits or self.died < NEVER or program is None or self.is_done:
            return
        self._waits += 1
        self._is_waiting = False
        world = self.world
        with world.run_by(self):
            clock.now += world.costs.step
            try:
                seconds = next(program)
            except StopIteration:
                self.is_done = True
            except Killed:
                pass
            self.busy_until = clock.now
        if self.died < NEVER:
            world.at(self.died, lambda: world.bury(self))
        elif not self.is_done:
            waits = self._waits
            world.at(self.busy_until + abs(seconds), lambda: self.step(waits))
            self._is_waiting = seconds > 0
            if self.has_news:
                self.wake()


class _Running:
    """A block in which a rank runs, also another thread of it."""

    def __init__(self, world: World, own: Process) -> None:
        self._world, self._own = world, own

    def __enter__(self) -> None:
        self._world.running = self._own
        clock.now = max(self._world.now, self._own.busy_until)

    def __exit__(self, *_: object) -> None:
        clock.now = self._world.now


class World:
    """Simulated ranks.

    Attributes:
        now: The time.
        processes: The ranks.
        groups: The members of the groups.
        num_messages, num_bytes, num_wakes: What was sent between hosts, and on them.
    """

    def __init__(
        self,
        hosts: Sequence[int],
        groups: Sequence[Sequence[int]],
        *,
        costs: Costs = Costs(),
        seed: int = 0,
        has_pages: bool = True,
    ) -> None:
        """Begin at time 0.

        Args:
            hosts: The host of each rank.
            groups: The ranks of each group.
            costs: How long things take.
            seed: Of what is random.
            has_pages: The ranks of a host share a page.
        """
        self.now = 0.0
        clock.now = 0.0
        self.groups = groups
        self.costs = costs
        self.num_messages = self.num_bytes = self.num_wakes = 0
        self.random = random.Random(seed)  # noqa: S311 - to be repeated
        self.store = Store(self)
        self.cut_off: dict[int, float] = {}  # hosts, and since when
        self.mates: dict[int, list[int]] = defaultdict(list)
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()
        self._last_arrival: dict[tuple[int, int], float] = {}
        for rank, host in enumerate(hosts):
            self.mates[host].append(rank)
        memories = {host: _Memory() for host in self.mates}
        self.processes = [
            Process(self, rank, host, self.mates[host], memories[host]) for rank, host in enumerate(hosts)
        ]
        self.running = self.processes[0]
        for process in self.processes:
            process.unit = process.host if has_pages else process.rank
        self._leaders = [ranks[0] for ranks in self.mates.values()]
        for number, ranks in enumerate(groups):
            num_here = defaultdict[int, int](int)
            for rank in ranks:
                num_here[self.processes[rank].unit] += 1
            with _shared_units(), _few_collections():
                for rank in ranks:
                    self._open(number, ranks, self.processes[rank], num_here)

    def _open(self, number: int, ranks: Sequence[int], own: Process, num_here: Mapping[int, int]) -> None:
        """Open the channel of a group, as `GroupRegistry` does."""
        mates = num_here[own.unit]
        with self.run_by(own):
            if mates == len(ranks):
                channel = copy_of("page_channel").PageChannel(number, ranks, own.links, own.page)
            elif mates > 1:
                channel = copy_of("hosts_channel").HostsChannel(number, ranks, own.links, own.page)
            else:
                channel = copy_of("socket_channel").SocketChannel(number, ranks, own.links)
        own.channels[number] = channel

    def run_by(self, own: Process) -> _Running:
        """Return a block in which a rank runs."""
        return _Running(self, own)

    def at(self, time: float, do: Callable[[], object]) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), do))

    def time_of(self, cost: float) -> float:
        """Return how long something takes this time."""
        return self.random.uniform(0, cost) if self.costs.is_random else cost

    def run(self, until: float) -> None:
        """Run until nothing happens any more, or until a time."""
        with _few_collections():
            while self._events and self._events[0][0] <= until:
                self.now, _, do = heapq.heappop(self._events)
                clock.now = self.now
                do()

    def notify(self, process: Process, time: float) -> None:
        """Let a rank notice something at a time."""

        def occur() -> None:
            process.has_news = True
            process.wake()

        self.at(time, occur)

    def deliver(self, sender: Process, receiver: Process, data: bytes) -> None:
        """Send a frame."""
        self.num_messages += 1
        self.num_bytes += len(data)
        sender.spend(self.costs.frame)
        link = sender.rank, receiver.rank
        time = self._last_arrival[link] = max(
            self._last_arrival.get(link, 0.0), sender.now + self.time_of(self.costs.hop)
        )

        def arrive() -> None:
            is_lost = sender.died < NEVER and time > self._last_arrival[link]
            if not is_lost and not self.is_apart(sender, receiver):
                frame = pop_frame(bytearray(data))
                assert frame is not None
                receiver.peers[sender.rank].arrived.append(frame)
                receiver.has_news = True
                receiver.wake()

        self.at(time, arrive)

    def is_cut_off(self, process: Process) -> bool:
        """Return whether a rank reaches no other host."""
        return self.now >= self.cut_off.get(process.host, NEVER)

    def is_apart(self, one: Process, other: Process) -> bool:
        """Return whether nothing arrives any more from one rank at the other one."""
        return one.host != other.host and (self.is_cut_off(one) or self.is_cut_off(other))

    def kill_at(self, rank: int, time: float) -> None:
        """Kill a rank at a time."""
        process = self.processes[rank]

        def kill() -> None:
            if process.died == NEVER:
                process.died = self.now
                self.bury(process)

        self.at(time, kill)

    def bury(self, process: Process) -> None:
        """Let others notice the end of a rank that was killed."""
        for other in process.peers:
            # The last frames, or none, are lost with the rank.
            link, kept = (process.rank, other), self.random.choice([0.0, self.random.random(), 1.0, 1.0])
            last = self._last_arrival.get(link, 0.0)
            self._last_arrival[link] = last if kept == 1 else min(last, self.now + kept * max(0.0, last - self.now))
            self._end_connection(other, process.rank, max(self.now, self._last_arrival[link]))
        for mate in self.mates[process.host]:
            if mate != process.rank:
                self._end_process(self.processes[mate], self.mates[process.host].index(process.rank))
        self._let_witness(process)

    def _end_connection(self, rank: int, lost: int, time: float) -> None:
        """Let a rank notice the end of a connection."""
        own = self.processes[rank]
        time += self.time_of(self.costs.end)

        def end() -> None:
            if not self.is_apart(own, self.processes[lost]) or time >= self.cut_off_since(own, self.processes[lost]):
                own.peers[lost].arrived.append(CLOSED)
                own.has_news = True
                own.wake()

        self.at(time, end)

    def cut_off_since(self, one: Process, other: Process) -> float:
        """Return from when the end of the connection between two ranks is noticed though no host reaches the other."""
        return min(self.cut_off.get(process.host, NEVER) for process in (one, other)) + KEEPALIVE_SECONDS

    def _end_process(self, own: Process, index: int) -> None:
        time = self.now + self.time_of(self.costs.end)
        self.at(time, lambda: own.ends.add(index))
        self.notify(own, time)

    def _let_witness(self, process: Process) -> None:
        """Let the witnesses write that a rank is gone."""
        leader = self.mates[process.host][0]
        if process.rank == leader:
            number = self._leaders.index(leader)
            witnesses = [self._leaders[other] for other in Tree(len(self._leaders)).neighbours(number)]
        else:
            witnesses = [leader]
        for rank in witnesses:
            self._witness(self.processes[rank], process.rank)

    def _witness(self, witness: Process, lost: int) -> None:
        def write() -> None:
            if witness.died == NEVER:
                busy = witness.busy_until
                with self.run_by(witness), suppress(Killed):
                    clock.now = self.now  # in a thread of its own
                    witness.links.board.mark_gone(lost, CLOSED)
                witness.busy_until = busy
                if witness.died < NEVER:
                    self.at(witness.died, lambda: self.bury(witness))

        self.at(self.now + self.time_of(self.costs.end) + self.time_of(self.costs.hop), write)

    def cut_off_at(self, host: int, time: float) -> None:
        """Cut a host off at a time."""

        def cut() -> None:
            self.cut_off[host] = self.now
            for process in self.processes:
                for other in process.peers:
                    if process.host == host != self.processes[other].host:
                        self._end_connection(other, process.rank, self.now + KEEPALIVE_SECONDS)
                        self._end_connection(process.rank, other, self.now + KEEPALIVE_SECONDS)
            leader = self.mates[host][0]
            number = self._leaders.index(leader)
            for other in Tree(len(self._leaders)).neighbours(number):
                self.at(
                    self.now + KEEPALIVE_SECONDS,
                    lambda other=other: self._witness(self.processes[self._leaders[other]], leader),  # type: ignore[misc]
                )

        self.at(time, cut)


@dataclass(kw_only=True)
class Action:
    """What a rank does in a step.

    Attributes:
        wait: How long after its last step, in seconds.
        way: It makes the "call", or another one ("differ"); it raises instead ("fail"); it does not come, nor to
            later calls of the group ("skip"); it leaves the group ("leave").
        timeout: How long it waits for the others.
        reads: It reads the bodies of all.
    """

    wait: float = 0.0
    way: str = "call"
    timeout: float = 100.0
    reads: bool = False


@dataclass(kw_only=True)
class Step:
    """A step of the members of a group.

    Attributes:
        group: The number of the group.
        actions: What each member does, by global rank.
        body_bytes: The length of the body of each member.
        combines: The bodies are combined.
    """

    group: int
    actions: Mapping[int, Action]
    body_bytes: int = 2
    combines: bool = True


@dataclass(kw_only=True)
class Ending:
    """How a step ended for a rank.

    Attributes:
        entered, ended: When; it has not at `NEVER`.
        verdict: The verdict; None while there is none, and if the rank has not waited for it.
        error: The error.
        sequence: The number of its last exchange.
    """

    entered: float = NEVER
    ended: float = NEVER
    sequence: int = 0
    verdict: Verdict | None = None
    error: RankwiseError | None = None


def body_of(rank: int, number: int, length: int) -> bytes:
    """Return the body of a rank in a step."""
    return bytes(((rank + 7 * number) % 251, rank // 251)) * (length // 2)


def call_of(rank: int, number: int, way: str = "call") -> Description:
    """Return the call of a rank in a step."""
    if way == "differ":
        return Description("barrier", site="train.py:99")
    return Description("all_reduce", {"step": number}, site="train.py:88")


def run_program(own: Process, steps: Sequence[Step], endings: Sequence[dict[int, Ending]]) -> Waits:
    """Take part in steps as a rank."""
    skipped = set()
    for number, (step, ended) in enumerate(zip(steps, endings, strict=True)):
        action = step.actions.get(own.rank)
        if action is None:
            continue
        channel = own.channels[step.group]
        yield from clock.sleep(action.wait)
        if action.way == "skip":
            skipped.add(step.group)
        if channel.closed or step.group in skipped:
            continue
        call = call_of(own.rank, number, action.way)
        ending = ended[own.rank] = Ending(entered=own.now)
        if action.way == "leave":
            channel.close("left the group")
        elif action.way == "fail":
            error = RemoteRankError(rank=own.rank, host="node", raised="ValueError: bad", traceback="")
            with channel.held():
                channel.post(call.frame(FrameKind.FAILED, pickle.dumps(error)))
        else:
            ranks = channel.ranks
            try:
                ending.verdict = yield from channel.agree(
                    call,
                    body_of(own.rank, number, step.body_bytes),
                    combine=b"".join if step.combines else None,
                    read=range(len(ranks)) if action.reads else (),
                    timeout=action.timeout,
                    on_pause=lambda _: None,
                )
                ending.error = ending.verdict.error
            except RankwiseError as error:
                ending.error = error
        ending.ended, ending.sequence = own.now, channel.sequence


def run_steps(world: World, steps: Sequence[Step], until: float) -> list[dict[int, Ending]]:
    """Run steps of all ranks, and return how they ended: for each step, by global rank."""
    endings: list[dict[int, Ending]] = [{} for _ in steps]
    for process in world.processes:
        process.start(run_program(process, steps, endings))
    world.run(until)
    for process in world.processes:
        process.close()
    return endings


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a call costs when all members come at the same time.

    Attributes:
        seconds: The time until the last member has the verdict.
        messages, num_bytes: What the ranks send over connections.
        wakes: How often ranks are woken by others of their host.
        connections: The largest number of connections of a rank.
        store_operations: The operations of the store.
    """

    seconds: float
    messages: int
    num_bytes: int
    wakes: int
    connections: int
    store_operations: int


# About as measured on two hosts with 10 Gbit/s: a frame takes 30 us, and 10 us of work on each side.
MEASURED: Final = Costs(hop=3e-5, wake=1e-5, frame=1e-5, step=2e-5, store=1e-4, end=0.0, is_random=False)


def cost(
    num_ranks: int,
    ranks_per_host: int,
    *,
    costs: Costs = MEASURED,
    body_bytes: int = 0,
    reads: bool = False,
    late: float = 0.0,
) -> Cost:
    """Return what a call costs in a group of all ranks.

    Args:
        num_ranks: The number of ranks.
        ranks_per_host: How many of them are on a host.
        costs: How long things take.
        body_bytes: The length of the message of each rank.
        reads: All ranks read the messages of all others.
        late: How much later than the others the last rank comes, in seconds.
    """
    hosts = [rank // ranks_per_host for rank in range(num_ranks)]
    world = World(hosts, [range(num_ranks)], costs=costs)
    actions = {rank: Action(wait=0.1, reads=reads) for rank in range(num_ranks)}
    step = Step(group=0, actions=actions, body_bytes=body_bytes, combines=False)
    run_steps(world, [step], 1.0)
    before = world.num_messages, world.num_bytes, world.num_wakes, world.store.num_operations
    last = replace(actions[0], wait=actions[0].wait + late)
    (endings,) = run_steps(world, [replace(step, actions={**actions, num_ranks - 1: last})], 1000.0)
    assert all(ending.error is None and ending.verdict is not None for ending in endings.values())
    return Cost(
        seconds=max(ending.ended for ending in endings.values()) - endings[num_ranks - 1].entered,
        messages=world.num_messages - before[0],
        num_bytes=world.num_bytes - before[1],
        wakes=world.num_wakes - before[2],
        connections=max(len(process.peers) for process in world.processes),
        store_operations=world.store.num_operations - before[3],
    )
