"""What a rank raised, as text: its traceback as the interpreter shows it; its class and message in one line."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

from rankwise.errors import CollectiveError, MismatchError, RemoteRankError, message_of

# How gloo reports that another rank has ended.
_CUT_OFF: Final = ("Connection closed by peer", "Connection reset by peer")
# The files whose frames come before the program's: of this package, and what runs `-c` and `-m`.
_LAUNCHER: Final = f"{Path(__file__).parent}{os.sep}"
_INTERPRETER: Final = (runpy.__file__, "<string>", "<frozen runpy>")
# The frames nearest to the error that the interpreter shows; an endless recursion may have a million.
_FRAMES: Final = 1000


def formatted(error: BaseException) -> str:
    """Return an error's traceback as text."""
    limit = getattr(sys, "tracebacklimit", _FRAMES)
    return "".join(traceback.format_exception(error, limit=-min(limit, _FRAMES) if limit > 0 else 0))


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of what runs the program."""
    while trace is not None and _is_launchers(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_launchers(file: str) -> bool:
    return file.startswith(_LAUNCHER) or file in _INTERPRETER


def is_consequence(error: BaseException) -> bool:
    """Return whether an error is the consequence of another rank's end."""
    if isinstance(error, (CollectiveError, RemoteRankError)):
        return not isinstance(error, MismatchError)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in message_of(error) for phrase in _CUT_OFF)
