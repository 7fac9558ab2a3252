"""Ending a forked rank as the interpreter would, in a tenth of the time.

The interpreter takes down every module; most of them are the fork server's, whose memory that would copy, page by page.
Those are left as they are, and all else ends as ever: threads, what was registered with atexit, the program's objects.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Collection


def leave(status: int, imported_before: Collection[str] | None = None) -> None:
    """End this process.

    Args:
        status: The exit status; of an interrupted program, the signal's negative number.
        imported_before: The modules that the fork server had; None in a fresh interpreter, which ends by itself.
    """
    if imported_before is None and status >= 0:
        sys.exit(status)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - what the interpreter waits for threads with
        atexit._run_exitfuncs()  # noqa: SLF001 - as it does then
        flush()
        _take_down(imported_before or ())
        flush()
        ctypes.CDLL(None).fflush(None)  # what compiled code has printed
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
    finally:
        os._exit(status)


def flush() -> None:
    """Write what is left in the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _take_down(imported_before: Collection[str]) -> None:
    """Let go of the program's objects: a file that it has not closed is written, `__del__` runs."""
    # A daemon thread runs until the end, and finds its world gone before that.
    threading.excepthook = lambda _: None
    names = [name for name in sys.modules if name not in imported_before or name == "__main__"]
    modules = [sys.modules.pop(name) for name in reversed(names)]
    gc.collect()
    for module in modules:
        variables = getattr(module, "__dict__", {})
        for name in [*(name for name in variables if name[:1] == "_"), *variables]:
            if name != "__builtins__":
                variables[name] = None
    gc.collect()
