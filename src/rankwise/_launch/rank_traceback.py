"""The traceback of an exception in a rank: as text, as the interpreter shows it, without the frames of the launcher."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Final

from rankwise._user_frames import strip_internal_frames
from rankwise.errors import CollectiveError, MismatchError, RemoteRankError, message_of

# The messages of gloo when another rank has ended.
_CONNECTION_LOST: Final = ("Connection closed by peer", "Connection reset by peer")
# The files whose frames come before the program's: of this package, and of what implements `-c` and `-m`.
_LAUNCHER: Final = f"{Path(__file__).parent}{os.sep}"
_INTERPRETER: Final = (runpy.__file__, "<string>", "<frozen runpy>")
# The number of frames, nearest to the error, that are shown: those of an endless recursion may be a million.
_FRAMES: Final = 1000


def format_traceback(error: BaseException) -> str:
    """Return an error's traceback as text."""
    limit = getattr(sys, "tracebacklimit", _FRAMES)
    return "".join(traceback.format_exception(error, limit=-min(limit, _FRAMES) if limit > 0 else 0))


def keep_program_frames(error: BaseException) -> None:
    """Remove the frames that run the program from the traceback of an error, and those of rankwise's own errors."""
    trace = error.__traceback__
    while trace is not None and _is_launcher(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error.__traceback__ = trace
    strip_internal_frames(trace, error)


def _is_launcher(file: str) -> bool:
    return file.startswith(_LAUNCHER) or file in _INTERPRETER


def is_consequence(error: BaseException) -> bool:
    """Return whether an error is only the consequence of another rank's end."""
    if isinstance(error, (CollectiveError, RemoteRankError)):
        return not isinstance(error, MismatchError)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in message_of(error) for phrase in _CONNECTION_LOST)
