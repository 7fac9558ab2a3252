"""Rank 1 has a non-blocking recv from rank 0 pending when something happens, as the argument says."""

import os
import signal
import sys
import time

import rankwise as rw

how = sys.argv[1]
rw.init(timeout=2.0 if how in {"never", "other"} else 280.0)
rw.barrier()
if rw.get_rank() == 1:
    work = rw.recv(src=0, async_op=True)
    sent = rw.send("value", dst=0, async_op=True)
    if how not in {"exit", "nothing"}:
        rw.send("pending", dst=0) if how == "die" else sent.wait()
        try:
            print(work.wait())
        except rw.CollectiveError as error:
            print(type(error).__name__, error)
        if how in {"never", "other"}:
            rw.barrier("next", timeout=200)
    # How "exit" and "nothing": the interpreter waits.
else:
    assert rw.recv(src=1) == "value"
    if how == "die":
        assert rw.recv(src=1) == "pending"
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise ValueError("no data")
    elif how == "exit":
        time.sleep(1.0)
        rw.send("late", dst=1)
    elif how == "never":
        time.sleep(3.0)
        rw.barrier("next", timeout=200)
    elif how == "other":
        rw.barrier("next", timeout=200)
    # How "nothing": it leaves.
