"""Join, but a rank fails in a given way between the meeting and the end of joining; the others print what they raise.

Ways: "raises" or "killed" while it takes its device; "late", killed when the process group is open and
ranks connect.
"""

import os
import signal
import sys
from typing import NoReturn

import rankwise as rw
from rankwise._comm import registry
from rankwise._session import joining

how, who = sys.argv[1], sys.argv[2]


def fail(*_: object) -> NoReturn:
    raise RuntimeError("the driver has no memory")


def die(*_: object, **_more: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ["RANK"] == who:
    if how == "late":
        vars(registry)["connect"] = die
    else:
        vars(joining)["bind"] = fail if how == "raises" else die
try:
    with rw.init():
        pass
except RuntimeError as error:
    print(type(error).__name__, error)
