"""Interpreter exit in a forked rank: the same effects as in a normal exit, in a tenth of the time.

The interpreter clears every module. In a forked rank most modules are the fork server's, and to clear them would copy
their memory page by page. They are left alone here; threads, atexit functions and the program's objects end as usual.
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
from typing import Final, NoReturn

# Where the interpreter keeps the error that ended a program, with its frames and their variables.
_LAST_ERROR: Final = ("last_exc", "last_type", "last_value", "last_traceback")
# The exit status of an interpreter whose standard output could not be written at its end.
_UNWRITTEN: Final = 120


def exit_interpreter(status: int, imported_before: Collection[str] | None = None) -> NoReturn:
    """End this process.

    Args:
        status: The exit status; for an interrupted program, the negative number of the signal.
        imported_before: The modules of the fork server; None in a new interpreter, which exits by itself.
    """
    if imported_before is None and status >= 0:
        sys.exit(status)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - the interpreter waits for threads with it
        atexit._run_exitfuncs()  # noqa: SLF001 - as the interpreter does next
        if not flush() and status >= 0:
            status = _UNWRITTEN
        _clear_program(imported_before or ())
        flush(report=False)
        ctypes.CDLL(None).fflush(None)  # output of compiled code
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
    finally:
        os._exit(status)


def exit_without_teardown(status: int) -> NoReturn:
    """End a launcher by SystemExit, without the teardown of modules: to unload torch takes longer than to start a rank.

    A profiler around the launcher writes its results as SystemExit passes, and what measures coverage in a function
    that runs at exit.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would interrupt the exit
    atexit.register(_skip_teardown, status)
    sys.exit(status)


def _skip_teardown(status: int) -> NoReturn:
    """Run what else is registered, which was registered earlier, and end the process."""
    atexit.unregister(_skip_teardown)
    atexit._run_exitfuncs()  # noqa: SLF001 - as the interpreter would go on
    flush(report=False)
    os._exit(status)


def flush(*, report: bool = True) -> bool:
    """Flush the standard streams; return False if standard output cannot be written.

    Args:
        report: Print the error, as the interpreter does.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    try:
        if not getattr(sys.stdout, "closed", False):
            sys.stdout.flush()
    except AttributeError:
        return True  # there is none, or a replacement without flush
    except Exception as error:  # noqa: BLE001 - any error: no caller is left to raise it to
        if report:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"Exception ignored while flushing sys.stdout:\n{type(error).__qualname__}: {error}\n")
        return False
    return True


def _clear_program(imported_before: Collection[str]) -> None:
    """Release the program's objects: files that are still open are flushed, and `__del__` runs."""
    # A daemon thread runs until the end, and may find its modules cleared before that.
    threading.excepthook = lambda _: None
    for name in _LAST_ERROR:
        vars(sys).pop(name, None)
    names = [name for name in sys.modules if name not in imported_before or name == "__main__"]
    # Weak references, as in the interpreter: a module that only `sys.modules` refers to is released as a whole, and the
    # finalizers of its objects find their globals in place. Modules with other references are cleared after that.
    modules = [weakref.ref(sys.modules[name]) for name in names if isinstance(sys.modules[name], types.ModuleType)]
    for name in names:
        del sys.modules[name]
    gc.collect()
    for reference in reversed(modules):
        _clear(reference())
    gc.collect()


def _clear(module: types.ModuleType | None) -> None:
    """Clear a module that is still referred to, in the interpreter's order: names with one underscore first."""
    variables = {} if module is None else vars(module)
    private = [name for name in variables if name[:1] == "_" and name[1:2] != "_"]
    for name in [*private, *variables]:
        if name != "__builtins__":
            variables[name] = None
