"""As many ranks as it has, on many hosts: what large jobs are promised.

Usage: many_hosts.py [RANKS_PER_HOST], if the hosts are none: each so many ranks are as if they were on one of their own
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from typing import Any, cast

import torch

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.control import registry as registry_module
from rankwise._comm.control.links import connect as connect_module

PER_HOST = int(sys.argv[1]) if sys.argv[1:] else 0


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if PER_HOST:
        connect, registry = cast(Any, connect_module), cast(Any, registry_module)
        connect.network_id = lambda: f"host{rank // PER_HOST}"
        registry.connect = functools.partial(_connect, registry.connect)
    rw.init(timeout=100)
    size = rw.get_world_size()
    assert rw.all_reduce(rank) == size * (size - 1) // 2
    assert rw.all_gather(rank) == list(range(size))
    assert rw.broadcast(("config", rank), src=size - 1) == ("config", size - 1)
    if rank == 0:
        print("joined", flush=True)
    links: Any = comm_of(None)._registry._links  # type: ignore[union-attr]
    num_connections = max(rw.all_gather(len(links._peers)))
    if rank == 0:
        print(f"{num_connections} connections at most", flush=True)
    odd = size // 2 + 1
    try:
        rw.all_reduce(1.0 if rank != odd else [1.0])
    except rw.MismatchError as error:
        expect("mismatch", f"rank {odd}", error)
    try:
        with rw.one_rank_only(odd) as mine:
            if mine:
                raise ValueError("no data")  # noqa: TRY301 - for all ranks
    except (rw.RemoteRankError, ValueError) as error:
        expect("one rank", "no data", error)
    for late, name in (([odd], f"rank {odd} "), (range(size // 2, size), f"each of ranks {size // 2}-{size - 1} on ")):
        try:
            time.sleep(12 if rank in late else 0)
            rw.barrier("slow", timeout=5)
        except rw.CollectiveTimeoutError as error:
            expect(f"{len(late)} missing", f"Missing: {name}", error)
    rw.barrier("together again")
    if rank == odd:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        rw.barrier("last")
    except rw.CollectiveError as error:
        expect("dead", f"rank {odd} ", error)
    os._exit(0)


def expect(what: str, text: str, error: Exception) -> None:
    if text not in str(error):
        print(f"rank {rw.get_rank()}: {what}: {error}", flush=True)
    elif rw.get_rank() == 0:
        print(what, flush=True)


def _connect(original: Any, **arguments: Any) -> Any:
    return original(**{**arguments, "one_host": False, "own_address": lambda: "127.0.0.1"})


if __name__ == "__main__":
    main()
