"""`breakpoint()` in a rank: while somebody debugs, no limit passes; where output is captured, it fails in one line."""

from __future__ import annotations

import bdb
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from _pytest.capture import DontReadFromInput

from rankwise.testing._plugin.messages import DebuggerEvent

_BETWEEN: Final = ("/_pytest/", "/pluggy/", "/rankwise/testing/")


class DebuggerHooks:
    """The hooks of a debugger in a rank."""

    def __init__(self, tell: Callable[[object], None], *, is_captured: bool) -> None:
        """Prepare for debuggers.

        Args:
            tell: Tells pytest's own process something.
            is_captured: Nobody sees what ranks print, and nobody can answer.
        """
        self._tell = tell
        self._is_captured = is_captured
        self._process = os.getpid()
        if is_captured:
            sys.stdin = DontReadFromInput()  # as in pytest's own process: an error that tells how to read

    def pytest_enter_pdb(self) -> None:
        if self._is_captured:
            frames = reversed(traceback.extract_stack())
            frame = next(frame for frame in frames if not any(part in frame.filename for part in _BETWEEN))
            place = f"{Path(frame.filename).name}:{frame.lineno}: "
            pytest.fail(f"{place}a debugger was called while output is captured; run pytest with -s", pytrace=False)
        self._note(begins=True)

    def pytest_leave_pdb(self) -> None:
        self._note(begins=False)

    def _note(self, *, begins: bool) -> None:
        if os.getpid() == self._process:
            self._tell(DebuggerEvent(begins=begins))


def restore_sigint_handler() -> None:
    """Let Ctrl-C be what it was before a debugger took it, which it does whenever it lets a program go on."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(getattr(handler, "__self__", None), bdb.Bdb):
        signal.signal(signal.SIGINT, signal.default_int_handler)
