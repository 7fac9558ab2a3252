"""Prints the topology in a process group that no variable describes. Argument: "init", "getters", "late" or "child".

The name of the host is that of the variable NAME. RANK and so on are taken away, but from the rank of KEEPS.
"""

import os
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

import rankwise as rw

how = sys.argv[1]
rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
if os.environ["KEEPS"] != str(rank):
    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD", "LOCAL", "MASTER", "NODE", "NUM_NODES")):
            del os.environ[name]
host = os.environ["NAME"]
socket.gethostname = lambda: host
group_timeout = timedelta(seconds=3 if how == "late" else 100)
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=group_timeout
)


def numbers() -> str:
    try:
        found = rw.topology()
    except rw.RankwiseError as error:
        return f"{type(error).__name__}: {error}"
    return " ".join(str(getattr(found, name)) for name in ("local_rank", "local_world_size", "node_rank", "num_nodes"))


if how in {"init", "child"} or (how == "late" and rank != 1):
    rw.init()
if how == "child":
    print("parent", numbers() if rank == 0 else "", flush=True)
    dist.barrier()
    child = os.fork()
    if not child:
        rw.get_rank()
        print("child", numbers(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
else:
    print(numbers(), flush=True)
if how == "init":
    print(rw.get_local_rank(), rw.node_group().ranks, rw.one_per_node_group().ranks, flush=True)
if how == "late":  # rank zero serves the store, which the others still ask
    store = dist.distributed_c10d._get_default_store()
    store.set(f"has printed/{rank}", "")
    if rank == 0:
        store.wait([f"has printed/{other}" for other in range(size)], timedelta(seconds=100))
else:
    dist.barrier()
dist.destroy_process_group()
