"""The process of a rank, forked from the fork server or in a new interpreter: it runs the target.

A script finds the same environment as under `python script.py`. `interpreter_exit` ends the process after it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import pickle
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
from types import MappingProxyType
from typing import Any, Final

from rankwise._launch.forkserver.interpreter_exit import exit_interpreter, flush
from rankwise._launch.forkserver.ipc import Leaving, StartRequest, TargetKind, WorkerResult, receive_message, serialize
from rankwise._launch.forkserver.rank_debugger import (
    RankTerminal,
    debug_post_mortem,
    set_breakpoint_hook,
    stop_at_first_line,
    wait_for_debugpy,
)
from rankwise._launch.interpreter import interpreter_options
from rankwise._launch.late_variables import late_setting_warning
from rankwise._launch.main_module import prepare_piped_script, prepare_script
from rankwise._launch.process_title import set_title
from rankwise._launch.rank_traceback import format_traceback, is_consequence, keep_program_frames
from rankwise._launch.standard_streams import STANDARD_INPUT
from rankwise._net.pausable_timeouts import follow_pauses
from rankwise._rank_files import offer_stacks
from rankwise.errors import RankFailure, message_of, summary

_NOT_RUN: Final = 126
# Signals that the interpreter ignores from its start, and that programs do not expect to be ignored.
_IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)


def main(search_path: Sequence[str]) -> None:
    """Run a rank in a new interpreter, with the search path of that interpreter."""
    sys.path[:] = search_path
    connection, crashes = (int(word) for word in sys.argv[1:])
    for descriptor in (connection, crashes):
        os.set_inheritable(descriptor, False)
    exit_interpreter(run_worker(connection, crashes))


def run_worker(descriptor: int, crashes: int, preloaded: Mapping[str, str] = MappingProxyType({})) -> int:
    """Receive the start request, run its target, send the result, and return the exit status.

    Args:
        descriptor: The connection to the launcher.
        crashes: The file for the stacks of threads after a crash.
        preloaded: The environment variables that preloaded modules have set.
    """
    is_preloaded = "torch" in sys.modules
    connection = socket.socket(fileno=descriptor)
    request: StartRequest = receive_message(connection)
    if not request.has_stdin:
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - of all ranks
            os.dup2(nothing.fileno(), 0)
    _prepare_process({**request.environ, **preloaded}, request.target.argv)
    faulthandler.enable(crashes)
    if request.target.kind is TargetKind.PROGRAM:
        return _exec_program(request.target.argv)
    _set_process_name(request)
    _offer_stacks(request)
    terminal = _prepare_debugging(request, connection)
    pid = os.getpid()  # the target may fork, and only this process is the rank
    try:
        _report_leaving(request, connection)
        if request.debugpy:
            wait_for_debugpy(request.environ.get("RANK", "0"))
        if request.debug:
            stop_at_first_line(terminal)
        value = _run(request, connection, crashes)
    except BaseException as error:  # noqa: BLE001 - any of them is the result of the rank
        if request.debug and os.getpid() == pid and not isinstance(error, SystemExit):
            keep_program_frames(error)
            debug_post_mortem(terminal, error, format_traceback(error))
        return _status(error, request, connection if os.getpid() == pid else None)
    else:
        _send(connection if os.getpid() == pid else None, WorkerResult(value=value, time_ns=time.monotonic_ns()))
    finally:
        connection.close()
        if is_preloaded and os.getpid() == pid and request.target.kind in {TargetKind.SCRIPT, TargetKind.MODULE}:
            _warn_of_late_settings(request.environ)
    return 0


class _LeavingHandler(logging.Handler):
    """Sends the launcher what a session logs as it closes after an error."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; not from a process that the rank has forked."""
        if isinstance(record.args, tuple):
            connection = self._connection if os.getpid() == self._pid else None
            _send(connection, Leaving(record.getMessage(), str(record.args[-1])))


def _report_leaving(request: StartRequest, connection: socket.socket) -> None:
    """Let the launcher know of an error with which a session is closed: it shows errors of several ranks once."""
    log = logging.getLogger("rankwise.leaving")
    if request.target.kind is TargetKind.FUNCTION:
        log.disabled = True  # the caller gets the error, and may expect it
    elif request.target.kind is not TargetKind.FUNCTION_WITH_CONNECTION:
        log.addHandler(_LeavingHandler(connection))


def _offer_stacks(request: StartRequest) -> None:
    """Let `rankwise stacks` find this rank, and request its stacks; those of the pytest plugin have another way."""
    variables = request.environ
    if request.target.kind is not TargetKind.FUNCTION_WITH_CONNECTION and "RANK" in variables:
        offer_stacks(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables["LOCAL_RANK"]),
        )


def _prepare_debugging(request: StartRequest, connection: socket.socket) -> RankTerminal:
    """Prepare for breakpoints in this rank, and in others; return the terminal."""
    terminal = RankTerminal(connection, int(request.environ.get("RANK", 0)))
    if request.timeouts:
        follow_pauses(request.timeouts)
    if request.can_debug:
        set_breakpoint_hook(terminal, os.environ)
    return terminal


def _warn_of_late_settings(initial: Mapping[str, str]) -> None:
    text = late_setting_warning(initial, os.environ)
    if text and os.environ.get("LOCAL_RANK") == "0":  # the others run the same script
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)


def _exec_program(argv: Sequence[str]) -> int:
    """Replace this process by a program; if that fails, return the exit status that shells give."""
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], list(argv))  # noqa: S606 - the user's own program
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be run: {error.strerror}; does its first line name its interpreter?\n")
        flush()
    return _NOT_RUN


def _prepare_process(environ: Mapping[str, str], argv: Sequence[str]) -> None:
    """Set up this process like a new interpreter with that environment and these arguments."""
    os.environ.clear()
    os.environ.update(environ)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    _renew_random_state()
    sys.argv[:] = argv or [""]
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=sys.modules["builtins"])
    if "__annotations__" in vars(sys.modules["__main__"]):  # not in Python 3.14, which makes them when they are read
        module.__dict__.update(__annotations__={})
    sys.modules["__main__"] = module


def _renew_random_state() -> None:
    """Give what an import has taken from the operating system's randomness new values, as each new process has.

    Otherwise all ranks would have those of the fork server: the same order of samples, the same dropout. Generators on
    accelerators begin with a constant in every process, and the seeds of `random` and of names of temporary files are
    renewed by each fork. Not renewed: the seed of hashes of text, which the interpreter has from its start; and
    generators that a preloaded module has made itself.
    """
    modules = sys.modules
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _set_process_name(request: StartRequest) -> None:
    """Give this process the name of its command, in place of that of the fork server."""
    command = ["-m", *request.target.argv] if request.target.kind is TargetKind.MODULE else request.target.argv
    sys.orig_argv[:] = [sys.executable, *interpreter_options(), *command]
    suffix = f" [rank {request.environ['RANK']}]" if "RANK" in request.environ else ""
    set_title(" ".join(sys.orig_argv) + suffix)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # noqa: SLF001 - a fork keeps the parent's


def _stream(descriptor: int, mode: str) -> io.TextIOWrapper | None:
    """Open a standard stream as the interpreter does, line-buffered for output."""
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
        errors="backslashreplace" if descriptor == 2 else getattr(before, "errors", None),  # stderr
        line_buffering=mode == "w" and not unbuffered,
        write_through=unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]  # as the interpreter sets it
    return stream


def _run(request: StartRequest, connection: socket.socket, crashes: int) -> bytes:
    """Run the target, and return the pickled return value of a function."""
    target = request.target
    if target.kind in {TargetKind.FUNCTION, TargetKind.FUNCTION_WITH_CONNECTION}:
        fn, args = pickle.loads(target.call).prepare()
        if target.kind is TargetKind.FUNCTION_WITH_CONNECTION:
            fn(connection, crashes, *args)
            return b""
        return pickled_result(fn(*args))
    if target.kind is TargetKind.MODULE:
        _search_first(str(Path.cwd()))
        runpy._run_module_as_main(target.argv[0])  # type: ignore[attr-defined]  # noqa: SLF001 - as `python -m` does
    elif target.source is not None:
        _search_first("" if target.argv[0] == STANDARD_INPUT else str(Path(target.argv[0]).resolve().parent))
        module = sys.modules["__main__"]
        exec(prepare_piped_script(module, target.argv[0], target.source), module.__dict__)  # noqa: S102
    else:
        _run_script(target.argv[0])
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
    exec(code, module.__dict__)  # noqa: S102 - the user's script


def _search_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _status(error: BaseException, request: StartRequest, connection: socket.socket | None) -> int:
    """Send an exception to the launcher, and return the status that the interpreter would exit with."""
    if isinstance(error, SystemExit):
        code = _exit_status(error)
        value = pickled_result(None) if code == 0 and request.target.kind is TargetKind.FUNCTION else b""
        _send(connection, WorkerResult(value=value, status=code, time_ns=time.monotonic_ns()))
        return code
    keep_program_frames(error)
    # Set for debuggers and atexit functions, as in the interpreter.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    pickled = pickle_error(error) if request.target.kind is TargetKind.FUNCTION else b""
    result = failed_result(error, int(request.environ.get("RANK", 0)), pickled)
    was_sent = _send(connection, result)
    if not was_sent or _is_hooked():
        hooked = _call_hook(error)
        return result.status if result.status < 0 else hooked
    return result.status


def failed_result(error: BaseException, rank: int, pickled: bytes) -> WorkerResult:
    """Return the result of a rank that has raised an exception, given the exception as bytes; b"" without."""
    # An interrupted program ends by the signal, so that its parent can see that.
    status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return WorkerResult(
        error=pickled,
        failure=RankFailure(
            rank=rank,
            host=socket.gethostname(),
            exitcode=status,
            raised=summary(error),
            traceback=format_traceback(error),
        ),
        status=status,
        consequence=is_consequence(error),
        time_ns=time.monotonic_ns(),
    )


def _call_hook(error: BaseException) -> int:
    """Call `sys.excepthook` with an error, as the interpreter does, and return the exit status."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as exit_:
        return _exit_status(exit_)
    except BaseException as failure:  # noqa: BLE001 - any error of a hook
        keep_program_frames(failure)
        failure.__context__ = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"Error in sys.excepthook:\n{format_traceback(failure)}\n")
            sys.stderr.write(f"Original exception was:\n{format_traceback(error)}")
    return 1


def _exit_status(error: SystemExit) -> int:
    """Return the status of sys.exit(), after printing its text."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    flush(report=False)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{message_of(error.code)}\n")
    return 1


def _is_hooked() -> bool:
    """Return whether the program has set `sys.excepthook`. Torch's hook does not count: it only adds the rank."""
    hook = getattr(sys, "excepthook", None)
    around = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    by_torch = getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d"
    return hook is not sys.__excepthook__ and not (by_torch and sys.__excepthook__ in around)


def _send(connection: socket.socket | None, message: WorkerResult | Leaving) -> bool:
    """Send a message to the launcher; return whether it was sent.

    Args:
        connection: The connection; None in a process that the rank has forked.
        message: The result, or what comes before it.
    """
    if connection is None:
        return False
    try:
        connection.sendall(serialize(message))
    except OSError:
        return False
    return True


def pickled_result(value: Any) -> bytes:  # noqa: ANN401 - any value of the user's
    """Return the return value of a function, pickled.

    Raises:
        TypeError: It cannot be pickled.
    """
    from rankwise._pickling import dumps, explained  # noqa: PLC0415 - scripts do not need it

    try:
        return dumps(value)
    except Exception as error:  # noqa: BLE001 - any error of an object
        text, cause = explained(error, "leave that part out")
        raise TypeError(
            f"the function returned a {type(value).__qualname__}, which cannot be pickled: {text}"
        ) from cause


def pickle_error(error: BaseException) -> bytes:
    """Return an exception, pickled; b"" if it cannot be pickled and unpickled."""
    from rankwise._pickling import dumps, loads  # noqa: PLC0415 - scripts do not need it

    try:
        pickled = dumps(error)
        loads(pickled)  # an exception whose __init__ takes other arguments can be pickled but not read again
    except Exception:  # noqa: BLE001 - its text is sent in any case
        return b""
    return pickled
