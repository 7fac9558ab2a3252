"""Rank 1 is in C with Python's lock; rank 0 waits."""

import ctypes
import os
import time

RANK = os.environ["RANK"]
print("ready", flush=True)
libc = ctypes.PyDLL(None)  # keeps the lock during a call
while RANK == "1":
    libc.sleep(600)  # which a signal ends
time.sleep(600)
