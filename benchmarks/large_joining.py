"""What joining takes in jobs of 4,096 and 16,384 ranks, besides what all ranks do at the same time.

The process that serves the store answers all ranks, and the first rank reads and answers all requests: that is serial.
Both run here as they do in a job, with the functions of the package, over a real store with a connection of each rank:

- The first rank finds the requests, hosts and pages of all others in the store.
- Processes that stand for the others then ask what ranks ask, one after the other: each finds what the first rank has
  written, so that nobody waits. What it asks while it waits comes to that; it is computed from the pause in between.

In a job each rank then builds what it knows of all others: seconds and bytes of one rank, which all ranks do at once.
For `benchmarks/large_jobs.py`.
"""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import Store, TCPStore

from rankwise._comm.control.links.connect import _Attempt, _exchange_hosts, _exchange_pages
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.places import Places, Units
from rankwise._comm.control.links.sockets import Address
from rankwise._comm.control.socket_channel import SocketChannel
from rankwise._net.host import host_id, network_id
from rankwise._net.job_secret import JobSecret
from rankwise._net.json_lines import encode_line
from rankwise._rendezvous.signed_store import part_of, signed
from rankwise._rendezvous.store import join_over_store
from rankwise._rendezvous.store_reads import longest_pause
from tests.comm.counting_store import PER_HOST, request_of

SIZES = (4096, 16_384)
NUM_CLIENTS = 2
NUM_CHECKS = 20_000
_SECRET = JobSecret("0123456789abcdef" * 4, "the benchmark")
_SECONDS = 500.0
_ADDRESS = Address(local="rankwise-" + 32 * "a", remote="10.1.23.45", port=40_000, secret=32 * "0")
# Torch looks up the name of each address to which it connects, and a name server may be slow.
_WITHOUT_NAMES = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/resolv.conf; exec "$@"')
_PAGE: Any = object()  # stands for a page


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What joining took.

    Attributes:
        ranks: The number of ranks.
        first: CPU seconds of the first rank.
        first_wall: How long it took.
        server: CPU seconds of the process that serves the store.
        check: CPU seconds of that process for one question.
        rank: CPU seconds of another rank, for what grows with the number of ranks.
        kept: Bytes that it keeps of that.
        most: Bytes that it takes meanwhile.
    """

    ranks: int
    first: float
    first_wall: float
    server: float
    check: float
    rank: float
    kept: int
    most: int

    @property
    def waiting(self) -> float:
        """The part of a processor that the store takes while all ranks wait for the first one."""
        return self.ranks / longest_pause(0.05, self.ranks) * self.check


def connected(port: int) -> Store:
    """Return the part of the store where the ranks of the job join."""
    client = TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=_SECONDS))
    return part_of(signed(client, _SECRET), "rankwise/1234567/0")


def attempt_of(session: Store, rank: int, size: int) -> _Attempt:
    """Return what a rank connects with."""
    return _Attempt(
        store=session,
        ranks=range(size),
        rank=rank,
        one_host=False,
        timeout=_SECONDS,
        deadline=time.monotonic() + _SECONDS,
        check_alive=lambda _: None,
    )


def serve() -> None:
    """Serve a store until nobody writes to the standard input any more."""
    raise_limit()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


def raise_limit() -> None:
    """Let this process open as many files as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def join_as_first(joint: Store, size: int) -> None:
    """Join and connect as the first rank, which finds what the others have written."""
    _, session = join_over_store(joint, request_of(0, size), timeout=_SECONDS)
    attempt = attempt_of(session, 0, size)
    by_host = Places(range(size), _exchange_hosts(attempt, watched=False)).by_host()
    _exchange_pages(attempt, by_host, 0, _PAGE)


def host_of(rank: int, size: int) -> str:
    """Return what a rank reports of its host; the first ones are on this one."""
    request = request_of(rank, size)
    return f"{request.host_id if rank >= PER_HOST else host_id()}/{network_id()} 0 {request.host}"


def prefill(joint: Store, size: int) -> None:
    """Write what the other ranks write for the first one, each eight of them on a host."""
    session = part_of(joint, "1")
    for rank in range(1, size):
        session.set(f"request/{rank}", request_of(rank, size).encode())
        session.set(f"host/{rank}", host_of(rank, size))
        if rank % PER_HOST == 0:
            session.set(f"paged/{rank}", "1")


def join_as_other(port: int, rank: int, size: int) -> Store:
    """Join and connect as another rank; returns its connection to the store."""
    joint = connected(port)
    _, session = join_over_store(joint, request_of(rank, size), timeout=_SECONDS)
    # As `_exchange_hosts` and `_exchange_pages`, without the work that other ranks do at the same time.
    session.set(f"host/{rank}", host_of(rank, size))
    attempt = attempt_of(session, rank, size)
    attempt.read({"hosts": 0})
    if rank % PER_HOST == 0:
        session.set(f"page/{rank}", encode_line(_ADDRESS))
        session.set(f"paged/{rank}", "1")
    attempt.read({"pages": 0})
    # In place of the address of the leader of its host, or of the one above it, which may not be written yet.
    session.set(f"address/{rank}", encode_line(_ADDRESS))
    attempt.read({f"address/{rank}": rank})
    return joint


def join_as_others(port: int, size: int, first: int) -> None:
    """Join and connect as the other ranks, or some of them, one after the other; prints how many."""
    raise_limit()
    joined = [join_as_other(port, rank, size) for rank in range(first, size, NUM_CLIENTS)]
    print(len(joined), flush=True)
    sys.stdin.read()


def work_of_a_rank(session: Store, size: int) -> tuple[float, int, int]:
    """Return the CPU seconds and bytes of a rank for what it knows of all others."""

    def work() -> tuple[Links, SocketChannel]:
        attempt = attempt_of(session, size - 1, size)
        places = Places(range(size), _exchange_hosts(attempt, watched=False))
        by_host = places.by_host()
        units = Units(places, _exchange_pages(attempt, by_host, places.host(size - 1), _PAGE))
        links = Links(size - 1, units=units, page=None, store=session, secret=_SECRET, own_address=lambda: "127.0.0.1")
        return links, SocketChannel(0, range(size), links)

    def closed(made: tuple[Links, SocketChannel]) -> None:
        links, channel = made
        channel.close("the benchmark has ended")
        links.close()

    closed(work())  # what is imported and cached
    start = time.process_time()
    closed(work())
    seconds = time.process_time() - start
    gc.collect()
    tracemalloc.start()
    made = work()
    gc.collect()
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    closed(made)
    return seconds, kept, most


def measure(size: int) -> Joining:
    """Measure the joining of so many ranks."""

    def started(stack: ExitStack, *arguments: str) -> Any:  # noqa: ANN401 - a process whose pipes are open
        command = [*_WITHOUT_NAMES, str(resolver), sys.executable, "-m", "benchmarks.large_joining", *arguments]
        process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(process.wait)
        stack.callback(process.stdin.close)
        return process

    with ExitStack() as stack:
        resolver = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "resolv.conf"
        resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")  # refuses at once
        server = started(stack, "serve")
        port = int(server.stdout.readline())
        process = psutil.Process(server.pid)

        def server_seconds() -> float:
            times = process.cpu_times()
            return times.user + times.system

        def of_server(work: Callable[[], object]) -> float:
            before = server_seconds()
            work()
            return server_seconds() - before

        joint = connected(port)
        prefill(joint, size)
        session = part_of(joint, "1")
        wall, own = time.perf_counter(), time.process_time()
        seconds = of_server(lambda: join_as_first(joint, size))
        wall, own = time.perf_counter() - wall, time.process_time() - own

        def others() -> None:
            clients = [started(stack, "others", str(port), str(size), str(1 + each)) for each in range(NUM_CLIENTS)]
            if sum(int(each.stdout.readline()) for each in clients) != size - 1:
                raise RuntimeError("not all ranks have joined")

        seconds += of_server(others)
        check = of_server(lambda: [session.check(["reply/0"]) for _ in range(NUM_CHECKS)]) / NUM_CHECKS
        rank, kept, most = work_of_a_rank(session, size)
    return Joining(ranks=size, first=own, first_wall=wall, server=seconds, check=check, rank=rank, kept=kept, most=most)


def table() -> list[str]:
    """Return the lines of the table, in Markdown."""
    names = ["ranks", "first rank, s", "store, s", "store, us a rank", "store while all wait", "each rank, ms", "kB"]
    return [
        f"| {' | '.join(names)} |",
        f"| {' | '.join(['---:'] * len(names))} |",
        *(
            f"| {found.ranks:,} | {found.first:.2f} | {found.server:.2f} | {found.server / found.ranks * 1e6:.0f} | "
            f"{found.waiting * 100:.0f} % | {found.rank * 1e3:.0f} | {found.kept / 1e3:.0f} |"
            for found in map(measure, SIZES)
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    elif sys.argv[1:2] == ["others"]:
        join_as_others(*map(int, sys.argv[2:5]))
    else:
        print(*table(), sep="\n")
