"""Every rank starts a process that outlives it if it can, says so, and then stays in the way that the argument says.

It also makes a semaphore and shared memory, which outlive all processes if nobody removes them.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
import torch.distributed as dist

import rankwise as rw

folder, how = Path(sys.argv[1]), sys.argv[2]
with rw.init(timeout=280.0):
    rank = rw.get_rank()
    daemon = subprocess.Popen(["sleep", "300"], start_new_session=True, env={})
    (folder / f"{rank}.pids").write_text(f"{os.getpid()} {daemon.pid}")
    lock = multiprocessing.get_context("spawn").Lock()
    memory = SharedMemory(create=True, size=1 << 20)
    name = lock._semlock.name.removeprefix("/")  # type: ignore[attr-defined]  # nothing else has it
    shared = [f"sem.{name}", memory.name]
    if how == "deaf":
        os.environ["TMPDIR"] = "/tmp"  # torch has a socket there, whose path may have 100 characters
        torch.multiprocessing.set_sharing_strategy("file_system")
        tensor = torch.ones(1).share_memory_()
        shared += [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
    (folder / f"{rank}.shared").write_text(" ".join(shared))
    rw.barrier()
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        rw.barrier()
    print("up", flush=True)
    if how == "end":
        sys.exit(0)
    if how == "raise" and rank == 1:
        raise ValueError("enough")
    if how == "C++":
        if rank == 0:
            dist.barrier()  # in gloo, for the others that never come
        ctypes.CDLL(None).sleep(300)
    if how == "rankwise" and rank == 0:
        rw.barrier()
    time.sleep(300)
