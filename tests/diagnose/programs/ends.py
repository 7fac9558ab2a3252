"""A rank that prints "up", and then does what the word for its rank among the arguments says; until a file exists.

A rank that fails does so when both ranks are up: the launcher ends the other, which may have more to set up first.
"""

import os
import signal
import sys
import time

END, RANK = sys.argv[1], int(os.environ["RANK"])
HOW = sys.argv[2 + RANK]


def wait(file: str = END) -> None:
    """Wait for a file."""
    while not os.path.exists(file):  # noqa: PTH110 - without the time to import pathlib
        time.sleep(0.05)


if HOW == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
open(f"{END}.up{RANK}", "w").close()  # noqa: PTH123 - as above
if HOW in {"fails", "times out"}:
    wait(f"{END}.up{1 - RANK}")
if HOW == "fails":
    raise ValueError("no data")
if HOW == "times out":
    raise TimeoutError("timed out: rank 1 did not come")
wait()
