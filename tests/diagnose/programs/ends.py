"""A rank that prints "up", and then does what the word for its rank among the arguments says; until a file exists."""

import os
import signal
import sys
import time

HOW = sys.argv[2 + int(os.environ["RANK"])]


def wait() -> None:
    """Wait for the file."""
    while not os.path.exists(sys.argv[1]):  # noqa: PTH110 - without the time to import pathlib
        time.sleep(0.05)


if HOW == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
if HOW == "fails":
    raise ValueError("no data")
if HOW == "times out":
    raise TimeoutError("timed out: rank 1 did not come")
wait()
