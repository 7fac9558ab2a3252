"""Join, but rank 1 asks for a device that there is not, or has no memory to look for one."""

import os
import sys

import rankwise as rw
from rankwise._session import joining


def out_of_memory(*_: object) -> None:
    raise MemoryError("no room")


if sys.argv[2:] == ["memory"] and os.environ["RANK"] == "1":
    vars(joining)["choose_device"] = out_of_memory

try:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    with rw.init(timeout=float(sys.argv[1]), device="warp" if os.environ["RANK"] == "1" and not sys.argv[2:] else None):
        pass
except (rw.RankwiseError, MemoryError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
