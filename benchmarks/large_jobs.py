"""What an agreement costs in jobs of 2 to 16,384 ranks, how soon all know of a failure, and what joining takes.

The costs are measured here: of a frame on its way between two hosts, of waking a rank, and of a leader's work for a
frame. The simulation runs the modules of the control plane themselves (`tests/comm/simulation.py`). What joining takes
is measured by `benchmarks/large_joining.py`. Prints tables, in Markdown.

Run: python -m benchmarks.large_jobs (as root, for hosts that are network namespaces)
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from benchmarks import large_joining
from rankwise._comm.control.calls import Calls, encode_calls, merged
from rankwise._comm.control.exchange import Exchange
from rankwise._comm.control.links.peer import Peer
from rankwise._comm.control.protocol import Description, Frame, FrameKind
from rankwise._comm.control.tree import Tree
from tests.clusters.hosts import on_two_hosts
from tests.comm.simulation import Action, Costs, Step, World, cost, run_steps

PER_HOST = 8
SIZES = (2, 8, 16, 64, 256, 512, 1024, 4096, 8192, 16_384)
PORT = 29_777
NAMED_SIZES = (1024, 8192)
TIMEOUT = 1.0
_MESSAGE = bytes(300)


def median_of(run: Callable[[], object], times: int) -> float:
    """Return the median of the seconds of a call."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def echo(host: str) -> None:
    """Measure a frame between two hosts: the side that answers, or the one that asks, which prints the seconds."""
    if host == "1":
        with socket.create_server(("10.9.9.2", PORT)) as listener:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(len(_MESSAGE)):
                connection.sendall(data)
        return
    deadline = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection(("10.9.9.2", PORT), timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def once() -> None:
        connection.sendall(_MESSAGE)
        connection.recv(len(_MESSAGE))

    print(median_of(once, 5000) / 2)


def seconds_of_a_hop() -> float:
    """Return how long a frame takes between two network namespaces, with the system calls on both sides."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.large_jobs", "echo"]
        ended = on_two_hosts(Path(folder), '"$@" $HOST', *command, PYTHONPATH=os.getcwd())  # noqa: PTH109
    return float(ended.stdout.split()[-1])


def seconds_of_a_wake() -> float:
    """Return how long it takes to wake another process through an eventfd."""
    there, back = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)

    def wait(descriptor: int) -> None:
        select.select([descriptor], [], [])
        os.eventfd_read(descriptor)

    child = os.fork()
    if not child:
        for _ in range(5000):
            wait(there)
            os.eventfd_write(back, 1)
        os._exit(0)

    def once() -> None:
        os.eventfd_write(there, 1)
        wait(back)

    seconds = median_of(once, 5000) / 2
    os.waitpid(child, 0)
    return seconds


def seconds_of_a_frame() -> float:
    """Return how long a leader works for a frame that it receives, or sends: with 16 leaders below it, for both."""
    calls = [Calls.of(member, Description("barrier", site="train.py:88").frame()) for member in range(PER_HOST)]
    body = encode_calls(merged(calls))
    tree = Tree(17)
    below, own = {}, {}
    for unit in tree.children(0):
        below[unit], own[unit] = (Peer(unit, "node", on_read=lambda: None) for _ in range(2))
        for peer, connection in zip((below[unit], own[unit]), socket.socketpair(), strict=True):
            connection.setblocking(False)
            peer.attach(connection)
    sequences = count(1)

    def once() -> None:
        sequence = next(sequences)
        for peer in below.values():
            peer.post(Frame(FrameKind.CALLS, "", body=body, sequence=sequence))
        for peer in own.values():
            peer.receive()
        inboxes = {unit: peer.inbox(0) for unit, peer in own.items()}
        exchange = Exchange(0, sequence, ranks=range(17), unit=0, tree=tree, inboxes=inboxes, combine=None)
        exchange.add_own(calls)
        exchange.step(0.0)
        for unit, frame in exchange.take_outgoing():
            own[unit].post(frame)
        for peer in below.values():
            peer.receive()

    return median_of(once, 500) / len(own) / 4  # two frames for each, both of which are sent and received here


def seconds_until_named(size: int, failure: str, costs: Costs) -> float:
    """Return how long it takes until a rank that fails while all others wait is named on all of them.

    Args:
        size: The number of ranks.
        failure: It raises ("fail"), makes another call ("differ"), is "killed", or does not come ("skip"): then from
            the end of the timeout.
        costs: How long things take.
    """
    world = World([rank // PER_HOST for rank in range(size)], [range(size)], costs=costs)
    odd, entered, failed = size // 2 + 3, 0.1, 0.15
    actions = {rank: Action(wait=entered, timeout=TIMEOUT if failure == "skip" else 100.0) for rank in range(size)}
    actions[odd] = Action(wait=100.0 if failure == "killed" else failed, way="call" if failure == "killed" else failure)
    if failure == "killed":
        world.kill_at(odd, failed)
    (endings,) = run_steps(world, [Step(group=0, actions=actions, body_bytes=0, combines=False)], 1000.0)
    others = [ending for rank, ending in endings.items() if rank != odd]
    if not all(f"rank {odd}" in str(ending.error) for ending in others):
        raise RuntimeError(f"rank {odd} is not named on all ranks")
    return max(ending.ended for ending in others) - (entered + TIMEOUT if failure == "skip" else failed)


def main() -> None:
    """Print the costs and the tables."""
    hop, wake, frame = seconds_of_a_hop(), seconds_of_a_wake(), seconds_of_a_frame()
    print(f"a frame between two hosts {hop * 1e6:.0f} us, a wake-up {wake * 1e6:.0f} us, work {frame * 1e6:.0f} us")
    costs = Costs(hop=hop, wake=wake, frame=frame, step=2e-5, store=1e-4, end=0.0, is_random=False)
    print("| ranks | hosts | ms a call | messages | bytes | connections of a rank |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        found = cost(size, PER_HOST, costs=costs)
        print(
            f"| {size:,} | {-(-size // PER_HOST):,} | {found.seconds * 1e3:.2f} | {found.messages:,} | "
            f"{found.num_bytes:,} | {found.connections} |"
        )
    print("\n| ranks | an error | another call | the end of a rank | a missing rank, after the timeout |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for size in NAMED_SIZES:
        seconds = [seconds_until_named(size, failure, costs) for failure in ("fail", "differ", "killed", "skip")]
        print(f"| {size:,} | {' | '.join(f'{one * 1e3:.0f} ms' for one in seconds)} |")
    print("", *large_joining.table(), sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["echo"]:
        echo(sys.argv[2])
    else:
        main()
