"""A number of threads that a script sets too late: torch reads it when it is loaded, and in a forked rank it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

_NAME: Final = "OMP_NUM_THREADS"


def set_too_late(started: Mapping[str, str], ended: Mapping[str, str]) -> str:
    """Return what to tell of a number of threads that was set in vain; "" if none was.

    Args:
        started: The environment that the script began with.
        ended: The one that it ended with.
    """
    before, after = started.get(_NAME, ""), ended.get(_NAME, "")
    if before == after or not (before.isdecimal() and after.isdecimal()):
        return ""
    number = sys.modules["torch"].get_num_threads()
    if number == int(after) or number != min(int(before), os.cpu_count() or 1):
        return ""  # the script has called torch.set_num_threads as well
    return (
        f"rankwise: the script has set {_NAME}={after} after torch was loaded, too late: it ran with {number}; "
        f"set it before `rankwise launch`, call torch.set_num_threads({after}), or start with --no-preload\n"
    )
