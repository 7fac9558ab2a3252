"""OMP_NUM_THREADS set too late by a script: torch reads it when it is imported, in a forked rank before the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

_NAME: Final = "OMP_NUM_THREADS"


def late_setting_warning(initial: Mapping[str, str], final: Mapping[str, str]) -> str:
    """Return a warning if a script has set the number of threads without effect; "" if it has not.

    Args:
        initial: The environment at the start of the script.
        final: The environment at its end.
    """
    before, after = initial.get(_NAME, ""), final.get(_NAME, "")
    if before == after or not (before.isdecimal() and after.isdecimal()):
        return ""
    number = sys.modules["torch"].get_num_threads()
    if number == int(after) or number != min(int(before), os.cpu_count() or 1):
        return ""  # the script has called torch.set_num_threads as well
    return (
        f"rankwise: the script has set {_NAME}={after} after torch was loaded, too late: it ran with {number}; "
        f"set it before `rankwise launch`, call torch.set_num_threads({after}), or start with --no-preload\n"
    )
