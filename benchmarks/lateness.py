"""What it costs a call to record when each rank came, beside another checkout: alternating, the least of the rounds.

git worktree add BEFORE COMMIT; python -m benchmarks.lateness BEFORE

The leader of a group of two ranks of a host, whose other member has written its frame already: so the call waits for
nobody, and other work on the machine does not hide some nanoseconds. Time of this thread alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from torch.distributed import HashStore

from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.places import Hosts, Places, Units
from rankwise._comm.control.page.host_page import HostPage
from rankwise._comm.control.page.layout import FILE_BYTES
from rankwise._comm.control.page_channel import PageChannel
from rankwise._comm.control.protocol import Description

ROUNDS = 12
BATCHES = 40
CALLS = 500
RANKS = (0, 1)


def leader_and_member() -> tuple[PageChannel, PageChannel]:
    """Return the channels of two ranks of a host, both in this process."""
    file = os.memfd_create("page")
    os.truncate(file, FILE_BYTES)
    channels = []
    for rank in RANKS:
        wakers = [os.eventfd(0, os.EFD_NONBLOCK) for _ in RANKS]
        processes = [os.pidfd_open(os.getpid()) for _ in RANKS]
        page = HostPage(ranks=RANKS, rank=rank, memory=os.dup(file), wakers=wakers, processes=processes)
        links = Links(
            rank,
            units=Units(Places(RANKS, Hosts.one(len(RANKS))), [True]),
            page=page,
            store=HashStore(),
            secret=None,
            own_address=str,
        )
        channels.append(PageChannel(0, RANKS, links, page))
    return channels[0], channels[1]


def call() -> Description:
    return Description("all_reduce", {"op": "sum"}, "float32[3]", site="train.py:88")


def measure() -> float:
    """Return the least mean time of a call of the leader, in nanoseconds."""
    leader, member = leader_and_member()
    least = float("inf")
    for _ in range(BATCHES):
        spent = 0
        for _ in range(CALLS):
            frame = call().frame()
            member.sequence += 1
            frame.group, frame.sequence = 0, member.sequence
            member._window.write(1, frame, has_room=True)  # noqa: SLF001
            own = call()
            start = time.thread_time_ns()
            leader.agree(own, b"", timeout=60.0, on_pause=lambda _: None)
            spent += time.thread_time_ns() - start
            member._window.finished[1] = member.sequence  # noqa: SLF001
        least = min(least, spent / CALLS)
    return least


def main() -> None:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="The other checkout; without it, only this one is timed.")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once or arguments.before is None:
        print(measure())
        return
    here = Path(__file__).parents[1]
    least = {arguments.before: float("inf"), here: float("inf")}
    for _ in range(ROUNDS):
        for checkout, before in least.items():
            environ = {**os.environ, "PYTHONPATH": str(checkout.absolute() / "src")}
            command = [sys.executable, __file__, "--once"]
            done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
            least[checkout] = min(before, float(done.stdout))
    before, after = least.values()
    print(f"before {before:.0f} ns, now {after:.0f} ns: {after - before:+.0f} ns a call")


if __name__ == "__main__":
    main()
