"""Being a rank: in a process forked from the fork server, or in a fresh interpreter.

A script finds what it would find under `python script.py`. How the process ends after it is decided in `leaving`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import random
import runpy
import signal
import socket
import sys
import threading
import time
import types
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankwise._launch.forkserver.interpreter_exit import flush, leave
from rankwise._launch.forkserver.ipc import StartRequest, TargetKind, WorkerResult, receive_message, serialize
from rankwise._launch.interpreter import options
from rankwise._launch.main_module import prepare_script
from rankwise._launch.omp_num_threads import set_too_late
from rankwise._launch.process_title import set_title
from rankwise._launch.rank_traceback import formatted, is_consequence, users_part
from rankwise.errors import message_of, summary

_NOT_RUN: Final = 126
# What the interpreter ignores from its start on, and programs do not expect to find ignored.
_IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)


def main(search_path: Sequence[str]) -> None:
    """Be a rank in a fresh interpreter, which searches for its modules where that does."""
    sys.path[:] = search_path
    descriptors = [int(word) for word in sys.argv[1:]]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    leave(run(*descriptors))


def run(descriptor: int, crashes: int) -> int:
    """Be the rank that the launcher asks for, tell it how that ended, and return the exit status.

    Args:
        descriptor: The connection to the launcher.
        crashes: Where to write the stack in a crash.
    """
    is_preloaded = "torch" in sys.modules
    connection = socket.socket(fileno=descriptor)
    request: StartRequest = receive_message(connection)
    _prepare(request)
    faulthandler.enable(crashes)
    if request.kind is TargetKind.PROGRAM:
        return _become(request.argv)
    _name_process(request)
    pid = os.getpid()
    try:
        value = _run(request, connection, crashes)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is how the rank ended
        return _status(error, request, connection if os.getpid() == pid else None)
    else:
        _send(connection if os.getpid() == pid else None, WorkerResult(value=value, time_ns=time.monotonic_ns()))
    finally:
        connection.close()
        if is_preloaded and os.getpid() == pid and request.kind in {TargetKind.SCRIPT, TargetKind.MODULE}:
            _tell_what_was_set_too_late(request.environ)
    return 0


def _tell_what_was_set_too_late(started: Mapping[str, str]) -> None:
    text = set_too_late(started, os.environ)
    if text and os.environ.get("LOCAL_RANK") == "0":  # the others run the same script
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)


def _become(argv: Sequence[str]) -> int:
    """Become a program; return the exit status that shells give where that is not possible."""
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], list(argv))  # noqa: S606 - the user's own program
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be run: {error.strerror}; does its first line name what runs it?\n")
        flush()
    return _NOT_RUN


def _prepare(request: StartRequest) -> None:
    """Make this process look like a new one with that environment."""
    os.environ.clear()
    os.environ.update(request.environ)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # its state was copied from the server's, the same for all ranks
        numpy.random.seed()
    sys.argv[:] = request.argv or [""]
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = module


def _name_process(request: StartRequest) -> None:
    """Make this process known as the command that it runs, and not as the one that it was forked from."""
    command = ["-m", *request.argv] if request.kind is TargetKind.MODULE else request.argv
    sys.orig_argv[:] = [sys.executable, *options(), *command]
    place = f" [rank {request.environ['RANK']}]" if "RANK" in request.environ else ""
    set_title(" ".join(sys.orig_argv) + place)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # noqa: SLF001 - a fork leaves the parent's


def _stream(descriptor: int, mode: str) -> io.TextIOWrapper | None:
    """Open a standard stream as the interpreter does, lines being written as they come."""
    try:
        file = io.FileIO(descriptor, mode, closefd=False)
    except OSError:
        return None
    file.name = f"<{('stdin', 'stdout', 'stderr')[descriptor]}>"
    before = (sys.stdin, sys.stdout, sys.stderr)[descriptor]
    unbuffered = mode == "w" and getattr(before, "write_through", False)  # by PYTHONUNBUFFERED
    raw = io.BufferedReader(file) if mode == "r" else file if unbuffered else io.BufferedWriter(file)
    stream = io.TextIOWrapper(
        raw,
        encoding=getattr(before, "encoding", None),
        errors="backslashreplace" if descriptor == 2 else getattr(before, "errors", None),  # noqa: PLR2004 - stderr
        line_buffering=mode == "w" and not unbuffered,
        write_through=unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]  # as the interpreter sets it
    return stream


def _run(request: StartRequest, connection: socket.socket, crashes: int) -> bytes:
    """Run what was asked for, and return what a function returned, pickled."""
    if request.kind in {TargetKind.FUNCTION, TargetKind.FUNCTION_WITH_CONNECTION}:
        fn, args = pickle.loads(request.call).prepare()
        if request.kind is TargetKind.FUNCTION_WITH_CONNECTION:
            fn(connection, crashes, *args)
            return b""
        return _pickled_result(fn(*args))
    if request.kind is TargetKind.MODULE:
        _search_first(str(Path.cwd()))
        runpy._run_module_as_main(request.argv[0])  # type: ignore[attr-defined]  # noqa: SLF001 - what `python -m` itself calls
    else:
        _run_script(request.argv[0])
    return b""


def _run_script(script: str) -> None:
    if Path(script).is_dir() or zipfile.is_zipfile(script):
        sys.path.insert(0, os.path.abspath(script))  # noqa: PTH100 - symbolic links are kept
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001
        return
    _search_first(os.path.dirname(os.path.realpath(script)))  # noqa: PTH120 - as the interpreter spells it
    path = os.path.abspath(script)  # noqa: PTH100 - symbolic links are kept in __file__
    module = sys.modules["__main__"]
    code = prepare_script(module, path)
    exec(code, module.__dict__)  # noqa: S102 - to run it is what this is for


def _search_first(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _status(error: BaseException, request: StartRequest, connection: socket.socket | None) -> int:
    """Tell the launcher what was raised, and return the status that the interpreter would end with."""
    if isinstance(error, SystemExit):
        code = _exit_status(error)
        value = _pickled_result(None) if code == 0 and request.kind is TargetKind.FUNCTION else b""
        _send(connection, WorkerResult(value=value, status=code, time_ns=time.monotonic_ns()))
        return code
    error.__traceback__ = users_part(error.__traceback__)
    # Set for debuggers, and for what runs at exit, as the interpreter does.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    # An interrupted program dies of the signal, in the end.
    status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    result = WorkerResult(
        error=pickle_error(error) if request.kind is TargetKind.FUNCTION else b"",
        raised=summary(error),
        traceback=formatted(error),
        status=status,
        consequence=is_consequence(error),
        time_ns=time.monotonic_ns(),
    )
    told = _send(connection, result)
    if not told or _is_hooked():
        hooked = _call_hook(error)
        return status if status < 0 else hooked
    return status


def _call_hook(error: BaseException) -> int:
    """Let the program's hook show an error, as the interpreter does, and return the status to end with."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as exit_:
        return _exit_status(exit_)
    except BaseException as failure:  # noqa: BLE001 - whatever it is: the program has ended
        failure.__traceback__ = users_part(failure.__traceback__)
        failure.__context__ = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(
                f"Error in sys.excepthook:\n{formatted(failure)}\nOriginal exception was:\n{formatted(error)}"
            )
    return 1


def _exit_status(error: SystemExit) -> int:
    """Return the status of sys.exit(), after writing its text."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    flush(telling=False)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{message_of(error.code)}\n")
    return 1


def _is_hooked() -> bool:
    """Return whether the program wants to show errors itself; torch's hook only adds the rank to what is shown."""
    hook = getattr(sys, "excepthook", None)
    around = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    by_torch = getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d"
    return hook is not sys.__excepthook__ and not (by_torch and sys.__excepthook__ in around)


def _send(connection: socket.socket | None, result: WorkerResult) -> bool:
    """Tell the launcher, if this is the rank and no child that it has forked; return whether it was told."""
    if connection is None:
        return False
    try:
        connection.sendall(serialize(result))
    except OSError:
        return False
    return True


def _pickled_result(value: Any) -> bytes:  # noqa: ANN401 - any value of the user's
    from rankwise._pickling import dumps  # noqa: PLC0415 - scripts do not need it

    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__qualname__}, which cannot be pickled: {error}"
        ) from error


def pickle_error(error: BaseException) -> bytes:
    """Return what was raised, pickled; b"" if it cannot be, or not be read again."""
    from rankwise._pickling import dumps, loads  # noqa: PLC0415 - scripts do not need it

    try:
        pickled = dumps(error)
        loads(pickled)  # an exception whose __init__ takes other arguments can be pickled but not read again
    except Exception:  # noqa: BLE001 - its text travels in any case
        return b""
    return pickled
