"""Exchange large values between hosts with several ranks each, and count the bytes that each host sends."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import rankwise as rw
from rankwise._collectives import shared_values

NUMEL = 1 << 20
NBYTES = 4 * NUMEL


def bytes_sent() -> int:
    """Return how many bytes this host has sent through its cable."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
    return sum(int(words[9]) for words in lines if words[0] in {"left0:", "right0:"})


def report(title: str, collective: Callable[[], Any]) -> Any:
    """Call a collective, print on rank zero how many values' bytes each host has sent, and return the result."""
    rw.barrier()
    start = bytes_sent()
    rw.barrier()
    result = collective()
    rw.barrier()
    sent = dict(rw.all_gather((socket.gethostname(), (bytes_sent() - start) // NBYTES)))
    if rw.get_rank() == 0:
        print(title, sent["left"], sent["right"], flush=True)
    return result


def check_private(results: list[torch.Tensor]) -> None:
    """Check that no rank sees what others write to their results."""
    rank = rw.get_rank()
    for result in results:
        result.add_(rank + 1)
    rw.barrier()
    for src, result in enumerate(results):
        assert (result == src + rank + 1).all(), (rank, src)


def check_obstacle(value: torch.Tensor, number: int) -> None:
    """A rank that cannot map what the first of its host has received gets it otherwise, but for lack of memory."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    rank, last = rw.get_rank(), rw.get_world_size() - 1
    cannot_map = patch.object(shared_values, "map_file", fail) if rank == last else nullcontext()
    try:
        with cannot_map:
            received: Any = rw.broadcast(value if rank == 0 else None)
    except (MemoryError, rw.RemoteRankError) as error:
        text = str(error)
    else:
        text = "received" if torch.equal(received, torch.zeros_like(value)) else "another value"
    wanted = "received"
    if number == errno.ENOMEM:
        wanted = "there is no memory for" if rank == last else f"rank {last}"
    if wanted not in text:
        raise AssertionError(text)


def num_files() -> int:
    """Return the number of open descriptors but those of connections, which are made when they are needed."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the list itself
            targets.append(str(descriptor.readlink()))
    return sum(not target.startswith("socket:") for target in targets)


def main() -> None:
    torch.set_num_threads(1)
    rw.init(timeout=60)
    rank, size = rw.get_rank(), rw.get_world_size()
    value = torch.full((NUMEL,), float(rank))
    rw.all_gather(value)
    descriptors = num_files()
    check_private(report("all_gather", lambda: rw.all_gather([value, "a" * rank]))[0][:1])
    check_private([one for one, _ in report("all_gather again", lambda: rw.all_gather((value, rank)))])
    (received,) = report("broadcast", lambda: rw.broadcast([value] if rank == size - 1 else None, src=size - 1))
    assert (received == size - 1).all()
    gathered = report("gather", lambda: rw.gather(value, dst=0))
    assert gathered is None if rank else all((one == src).all() for src, one in enumerate(gathered))
    (received,) = report("one rank", lambda: rw.all_gather(value if rank == 1 else rank))[1:2]
    assert (received == 1).all()
    if sys.argv[1:] == ["with-errors"]:
        check_obstacle(value, errno.EACCES)
        check_obstacle(value, errno.ENOMEM)
    assert (rw.broadcast(value) == 0).all()
    assert num_files() <= descriptors + 1, "descriptors are left"
    print("done", flush=True)


if __name__ == "__main__":
    main()
