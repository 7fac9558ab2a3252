"""Two ranks whose numbers are arguments of init(), or of a process group, start children: who do these think they are?

child_processes.py RANK PORT HOW START_METHOD
"""

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import rankwise as rw

# torch is imported in ranks alone: children import this module, and are asked for what needs no torch.


def place() -> tuple[int, int]:
    """Return the rank and the size of this process's world."""
    return rw.get_rank(), rw.get_world_size()


def place_of_child(connection: Any) -> None:
    """Send those of a child of this process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(sys.argv[4])) as pool:
        connection.send(pool.submit(place).result())


def own_world() -> tuple[int, int]:
    """Return the same in a child that sets variables of its own."""
    os.environ |= {"RANK": "3", "WORLD_SIZE": "4"}
    return rw.get_rank(), rw.get_world_size()


if __name__ == "__main__":
    rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if how == "adopted":
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    context: Any = multiprocessing.get_context(sys.argv[4])
    numbers: dict[str, Any] = {"local_rank": rank, "local_world_size": 2, "address": f"127.0.0.1:{port}"}
    rw.get_rank()  # of the group, or alone
    with rw.init() if how == "adopted" else rw.init(rank=rank, world_size=2, **numbers):
        with context.Pool(1) as pool:
            found = [pool.apply(place)]
        with context.Pool(1) as pool:
            found.append(pool.apply(own_world))
        ours, theirs = context.Pipe()
        child = context.Process(target=place_of_child, args=[theirs])
        child.start()
        found.append(ours.recv())
        child.join()
        code = "import rankwise as rw; print(rw.get_rank(), rw.get_world_size())"
        program = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    if how == "adopted":
        dist.destroy_process_group()
    with context.Pool(1) as pool:
        after = pool.apply(place)
    print(json.dumps([found, program.stdout.split(), after]))
