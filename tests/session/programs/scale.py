"""Sessions that are large, or have little room; the argument is one of the functions below."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from typing import Any

import psutil
import torch

import rankwise as rw
from rankwise._session.session import state_behind

torch.set_num_threads(1)


def many_ranks() -> None:
    """All ranks and groups of some of them, until one is killed."""
    with rw.init(timeout=180):
        rank, size = rw.get_rank(), rw.get_world_size()
        rw.barrier()
        assert rw.all_reduce(rank) == sum(range(size))
        thirds = [rw.new_group(range(start, size, 3)) for start in range(3)]
        halves = [rw.new_group(range(size // 2)), rw.new_group(range(size // 2, size))]
        for groups in (thirds, halves):
            (group,) = (group for group in groups if rank in group.ranks)
            assert rw.all_gather(rank, group=group) == list(group.ranks)
            assert rw.all_reduce(torch.full((5000,), float(rank)), group=group)[0] == sum(group.ranks)
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        check_groups([thirds[rank % 3], halves[2 * rank // size]], size - 1, "is gone")


def check_groups(groups: list[rw.Group], dead: int, why: str) -> None:
    """Check that the groups of a dead rank name it, and that others work."""
    for group in groups:
        try:
            outcome = str(rw.all_reduce(1, group=group))
        except rw.CollectiveError as error:
            outcome = str(error)
        assert f"rank {dead} {why}" in outcome if dead in group.ranks else outcome == str(group.size), outcome


def memory_of_page(comm: Any) -> int:
    """Return how much memory the page of the host takes."""
    return os.fstat(comm._registry._links.page._memory.descriptor).st_blocks * 512


def many_groups() -> None:
    """Groups that are made, used and closed leave nothing."""
    with rw.init(timeout=180) as session:
        process, rank, size = psutil.Process(), rw.get_rank(), rw.get_world_size()
        rw.all_reduce(torch.ones(5000))

        def use(count: int) -> tuple[int, int, int]:
            for number in range(count):
                members = sorted({number % size, (number + 1 + number % 2) % size})
                with rw.new_group(members) as group:
                    if rank in members:
                        rw.all_reduce(torch.ones(5000), group=group)
                        rw.all_reduce({"n": number}, group=group, async_op=True).wait()
                        rw.all_gather("x" * (number * 100), group=group)
            gc.collect()
            rw.barrier()
            held = process.num_fds(), process.num_threads(), memory_of_page(state_behind(session).comm)
            rw.barrier()
            return held

        before, resident = use(30), process.memory_info().rss
        after = use(300)
        assert before == after
        assert process.memory_info().rss - resident < 8 << 20


def two_hosts() -> None:
    """Groups within and across hosts, until a rank of the second host is killed."""
    with rw.init(timeout=100):
        rank, size = rw.get_rank(), rw.get_world_size()
        node, across, all_ranks = rw.node_group(), rw.one_per_node_group(), rw.new_group(range(size))
        for group in (node, across, all_ranks):
            assert rw.all_gather(rank, group=group) == list(group.ranks)
            assert rw.all_reduce(torch.full((5000,), float(rank)), group=group)[0] == sum(group.ranks)
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        check_groups([all_ranks, across, node], size - 1, "on right is gone")
        print("named", flush=True)


def few_files() -> None:
    """Join with a limit for open files, and run some collectives."""
    limit = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        with rw.init(timeout=20):
            rank, size = rw.get_rank(), rw.get_world_size()
            assert rw.all_reduce(rank) == sum(range(size))
            assert rw.all_gather(torch.full((5000,), float(rank)))[-1][0] == size - 1
            pairs = [rw.new_group([first, first + 1]) for first in range(0, size, 2)]
            assert rw.all_reduce(torch.ones(5000), group=pairs[rank // 2])[0] == 2
            print("works")
    except rw.RankwiseError as error:
        print(type(error).__name__, str(error).replace("\n", " "))


globals()[sys.argv[1]]()
