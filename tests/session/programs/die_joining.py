"""Join, but a rank fails in a given way between the meeting and the end of joining; the others print what they raise.

Ways: "raises" or "killed" while it takes its device; "opening", killed when the others open the process group; "late",
when it is open and ranks connect.
"""

import os
import signal
import sys
from typing import NoReturn

import torch.distributed as dist

import rankwise as rw
from rankwise._comm.control import registry
from rankwise._session import joining

how, who = sys.argv[1], sys.argv[2]


def fail(*_: object) -> NoReturn:
    raise RuntimeError("the driver has no memory")


def die(*_: object, **_more: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ["RANK"] == who:
    if how == "opening":
        vars(dist)["init_process_group"] = die
    elif how == "late":
        vars(registry)["connect"] = die
    else:
        vars(joining)["bind"] = fail if how == "raises" else die
try:
    with rw.init():
        pass
except RuntimeError as error:
    print(type(error).__name__, error)
