"""User frames: the frames of a stack or traceback that belong to the user's program.

A location in a message of rankwise, such as "train.py:88", is a line of the user's program. When an error of rankwise's
own leaves a collective, its traceback ends with the user's call and the function that was called: the message has all
else. With `python -X dev` all frames are kept, for debugging rankwise.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, ParamSpec, TypeVar

from rankwise.errors import RankwiseError

P = ParamSpec("P")
R = TypeVar("R")

# Frames of these packages are not user frames.
_INTERNAL_PACKAGES: Final = ("rankwise", "torch", "contextlib", "functools")
# The function of torch that runs a backward pass.
_BACKWARD: Final = "_engine_run_backward"


def call_site() -> str:
    """Return the file and line of the innermost user frame: "train.py:88"."""
    frame = sys._getframe(1)  # noqa: SLF001 - inspect.stack() reads source files, which is too slow for every call
    # As `is_user_frame`, without the cost of the call: every collective comes here.
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL_PACKAGES:
        frame = frame.f_back
    if frame.f_back is None and (backward := frame_of_backward()) is not None and not is_user_frame(frame):
        return site_of_caller(backward)
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"


def frame_of_backward() -> FrameType | None:
    """Return the frame of the main thread whose backward pass the calling thread works for; None if there is none.

    The backward pass of tensors on an accelerator runs in a thread of torch, which Python has not started, while the
    main thread waits for it.
    """
    if not isinstance(threading.current_thread(), threading._DummyThread):  # noqa: SLF001 - the class has no other name
        return None
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented
    while frame is not None and frame.f_code.co_name != _BACKWARD:
        frame = frame.f_back
    return frame


def site_of_caller(frame: FrameType) -> str:
    """Return the file and line of the innermost user frame that called the function with this frame: "train.py:88"."""
    caller = frame if frame.f_back is None or frame.f_code.co_name == "<module>" else frame.f_back
    while caller.f_back is not None and not is_user_frame(caller):
        caller = caller.f_back
    return f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"


def raised_at(error: BaseException) -> str:
    """Return the file and line of the innermost user frame that raised an error; else of any frame; "" if none.

    A frame of the program itself is preferred to those of other packages that it calls.
    """
    entries = list(traceback.walk_tb(error.__traceback__))
    entries = [entry for entry in entries if is_user_frame(entry[0])] or entries
    entries = [entry for entry in entries if not entry[0].f_code.co_filename.startswith(installed_folders())] or entries
    if not entries:
        return ""
    frame, line = entries[-1]
    return f"{Path(frame.f_code.co_filename).name}:{line}"


@functools.cache
def installed_folders() -> tuple[str, ...]:
    """Return where Python's own modules and installed packages are."""
    import sysconfig  # noqa: PLC0415 - most programs have no error

    return tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def strip_internal_frames(entry: TracebackType | None, error: BaseException) -> None:
    """Remove the internal frames after the last user frame from the traceback of an error of rankwise, or of Ctrl-C.

    Internal frames that called user code are kept, such as those that called a `__reduce__` that raised. So is the
    first entry, which its caller cannot do without.

    Args:
        entry: The first traceback entry to consider: the caller may be about to remove those before it.
        error: The error.
    """
    if not isinstance(error, (RankwiseError, KeyboardInterrupt)) or sys.flags.dev_mode:
        return
    last = entry
    while entry is not None:
        if is_user_frame(entry.tb_frame):
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None


def ends_at_caller(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function whose errors of rankwise, and Ctrl-C, end with the user's call in their tracebacks."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RankwiseError as error:
            strip_internal_frames(error.__traceback__, error)
            raise
        except KeyboardInterrupt as interrupt:  # in whatever this thread waited
            if interrupt.__traceback__ is not None and not sys.flags.dev_mode:
                interrupt.__traceback__.tb_next = None
            raise

    return call


def is_user_frame(frame: FrameType) -> bool:
    """Return whether a frame belongs to the user's program."""
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _INTERNAL_PACKAGES
