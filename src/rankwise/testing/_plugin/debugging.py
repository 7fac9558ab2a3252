"""`breakpoint()` in a rank: an open debugger suspends all time limits; where output is captured, the test fails."""

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

# Between the call in the test and the hook.
_FRAMES_OF_PLUGINS: Final = ("/_pytest/", "/pluggy/", "/rankwise/testing/")


class DebuggerHooks:
    """The hooks of a debugger in a rank."""

    def __init__(self, send: Callable[[object], None], *, is_captured: bool) -> None:
        """Prepare for debuggers.

        Args:
            send: Sends a message to pytest's own process.
            is_captured: Output is captured, so that a debugger has no terminal.
        """
        self._send = send
        self._is_captured = is_captured
        self._pid = os.getpid()
        if is_captured:
            sys.stdin = DontReadFromInput()  # as in pytest's own process: reading raises an error with advice

    def pytest_enter_pdb(self) -> None:
        if self._is_captured:
            frames = reversed(traceback.extract_stack())
            frame = next(frame for frame in frames if not any(part in frame.filename for part in _FRAMES_OF_PLUGINS))
            location = f"{Path(frame.filename).name}:{frame.lineno}"
            pytest.fail(
                f"{location}: a debugger was called while output is captured; run pytest with -s", pytrace=False
            )
        self._report(entered=True)

    def pytest_leave_pdb(self) -> None:
        self._report(entered=False)

    def _report(self, *, entered: bool) -> None:
        if os.getpid() == self._pid:  # and not a process that the test has forked
            self._send(DebuggerEvent(entered=entered))


def restore_sigint_handler() -> None:
    """Restore the handler of Ctrl-C, which pdb replaces by its own whenever it continues the program."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(getattr(handler, "__self__", None), bdb.Bdb):
        signal.signal(signal.SIGINT, signal.default_int_handler)
