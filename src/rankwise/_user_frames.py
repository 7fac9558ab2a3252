"""Which frames on a stack are the user's: where a call was made or an error raised, and what to show of a traceback.

In the messages of rankwise, "train.py:88" is a line of the user's program. Where an error of rankwise's own leaves a
collective, its traceback ends with the user's call and the function that was called: what is below is in the message.
With `python -X dev` all frames stay, for whoever works on rankwise.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from rankwise.errors import RankwiseError

# Whose frames on the stack are not the user's.
_NOT_THE_USERS: Final = ("rankwise", "torch", "contextlib", "functools")


def call_site() -> str:
    """Return where the user called: "train.py:88"."""
    frame = sys._getframe(1)  # noqa: SLF001 - inspect.stack() reads source files, which is too slow for every call
    # As `_is_users`, without the cost of calling it: every collective comes here.
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH119 - of every call


def raised_at(error: BaseException) -> str:
    """Return where in the user's program an error was raised; if nowhere there, where it was raised; or ""."""
    entries = list(traceback.walk_tb(error.__traceback__))
    entries = [entry for entry in entries if _is_users(entry[0])] or entries
    if not entries:
        return ""
    frame, line = entries[-1]
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def strip_internal_frames(entry: TracebackType | None, error: BaseException) -> None:
    """Cut an error's traceback below the first frame that is not the user's, if it is an error of rankwise's own.

    Nothing is cut above a frame of the user's, as of a `__reduce__` that raised.

    Args:
        entry: Where to begin, for what comes before may be about to leave the traceback.
        error: The error.
    """
    if not isinstance(error, RankwiseError) or sys.flags.dev_mode:
        return
    last: TracebackType | None = None
    while entry is not None:
        last = None if _is_users(entry.tb_frame) else last or entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None


def _is_users(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS
