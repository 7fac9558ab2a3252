"""`rankwise bench` as a rank that fails: in the twentieth call of `SIDE`, or where it allocates memory."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from typing import Any, NoReturn

from rankwise._bench import measuring, operations
from rankwise.cli.main import main

side, fault = os.environ["SIDE"], os.environ["FAULT"]
number = itertools.count()
all_reduce = operations.OPERATIONS["all_reduce"]


def fail(memory: operations.Memory) -> object:
    if next(number) == 20:
        os.kill(os.getpid(), signal.Signals[fault])
    return getattr(all_reduce, side)(memory)


def too_little(*_: object) -> NoReturn:
    raise MemoryError("no memory left")


changed: Any = operations.OPERATIONS  # a mapping that nothing changes but this
if fault == "memory":
    measuring.require_available = too_little  # type: ignore[attr-defined, assignment]  # it is imported there
else:
    changed["all_reduce"] = replace(all_reduce, ours=fail) if side == "ours" else replace(all_reduce, backends=fail)
main()
