"""Rank 0 has non-blocking collectives pending when something happens, as the argument says."""

import os
import signal
import sys
import threading
import time

import rankwise as rw

how = sys.argv[1]
rw.init(timeout=2.0 if how == "timeout" else 280.0)
rw.barrier()
if rw.get_rank() == 0:
    work = rw.all_reduce(1, async_op=True)
    rw.barrier(async_op=True)
    if how in {"finalize", "timeout"}:
        rw.finalize()
        print(work.wait() if how == "finalize" else "left")
    elif how == "raise":
        raise ValueError("no data")
    elif how == "interrupt":
        threading.Timer(0.3, os.kill, args=(os.getpid(), signal.SIGINT)).start()
        work.wait()
    elif how == "die":
        try:
            work.wait()
        except rw.CollectiveError as error:
            print(error)
    # How "exit": the interpreter waits.
elif how == "die":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "timeout":
    time.sleep(3.0)
else:
    time.sleep({"finalize": 1.0, "exit": 1.0, "interrupt": 3.0}.get(how, 0.0))
    if how in {"raise", "interrupt"}:
        try:
            rw.all_reduce(1)
            rw.barrier()
            rw.barrier("more")
        except rw.CollectiveError as error:
            print(error)
    else:
        print(rw.all_reduce(1))
        rw.barrier()
