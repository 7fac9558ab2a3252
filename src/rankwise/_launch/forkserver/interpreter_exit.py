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
import types
import weakref
from collections.abc import Collection
from typing import Final

# What the interpreter keeps of an error that ended a program, frames and their variables included.
_LAST_ERROR: Final = ("last_exc", "last_type", "last_value", "last_traceback")
# The exit status of an interpreter whose standard output could not be written at its end.
_UNWRITTEN: Final = 120


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
        if not flush() and status >= 0:
            status = _UNWRITTEN
        _take_down(imported_before or ())
        flush(telling=False)
        ctypes.CDLL(None).fflush(None)  # what compiled code has printed
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
    finally:
        os._exit(status)


def flush(*, telling: bool = True) -> bool:
    """Write what is left in the standard streams; False if standard output cannot be written.

    Args:
        telling: Show that, as the interpreter does.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    try:
        if not getattr(sys.stdout, "closed", False):
            sys.stdout.flush()
    except AttributeError:
        return True  # there is none, or what stands in for it has nothing to flush
    except Exception as error:  # noqa: BLE001 - whatever it is: there is nobody to raise it to
        if telling:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"Exception ignored in: {sys.stdout!r}\n{type(error).__qualname__}: {error}\n")
        return False
    return True


def _take_down(imported_before: Collection[str]) -> None:
    """Let go of the program's objects: a file that it has not closed is written, `__del__` runs."""
    # A daemon thread runs until the end, and finds its world gone before that.
    threading.excepthook = lambda _: None
    for name in _LAST_ERROR:
        vars(sys).pop(name, None)
    names = [name for name in sys.modules if name not in imported_before or name == "__main__"]
    # Weakly, as the interpreter does: a module that only `sys.modules` holds goes with all that it holds, and what its
    # objects do at their end finds their globals in place. What is held by something else loses its variables after it.
    modules = [weakref.ref(sys.modules[name]) for name in names if isinstance(sys.modules[name], types.ModuleType)]
    for name in names:
        del sys.modules[name]
    gc.collect()
    for reference in reversed(modules):
        _clear(reference())
    gc.collect()


def _clear(module: types.ModuleType | None) -> None:
    """Let go of what a module that is still there holds, in the interpreter's order: what has one underscore first."""
    variables = {} if module is None else vars(module)
    private = [name for name in variables if name[:1] == "_" and name[1:2] != "_"]
    for name in [*private, *variables]:
        if name != "__builtins__":
            variables[name] = None
