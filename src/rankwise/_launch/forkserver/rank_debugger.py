"""`breakpoint()` in a rank: pdb, with the terminal of the launcher; and other prompts of pdb and of the interpreter."""

from __future__ import annotations

import bdb
import code
import contextlib
import functools
import importlib
import json
import os
import pdb  # noqa: T100 - the debugger that ranks have
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final

from rankwise._launch.forkserver.ipc import TerminalRequest, serialize
from rankwise.errors import LaunchError

# Code that a person who steps through a script does not mean to see.
_NOT_STEPPED_INTO: Final = ("rankwise._launch.*", "runpy")


class RankTerminal:
    """The terminal of the launcher, for one rank."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._lock = threading.RLock()
        self._depth = 0

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Have the terminal as standard streams, in this block.

        Raises:
            LaunchError: There is no terminal, and this rank has no standard input either.
        """
        with self._lock:
            if self._depth:  # a breakpoint in an expression of the debugger
                yield
                return
            self._connection.sendall(serialize(TerminalRequest(wanted=True)))
            self._depth += 1
            try:
                with self._as_standard_streams(self._receive()):
                    yield
            finally:
                self._depth -= 1
                with contextlib.suppress(OSError):  # the launcher has ended
                    self._connection.sendall(serialize(TerminalRequest(wanted=False)))

    def _receive(self) -> int | None:
        """Wait for the terminal, and return its descriptor; None for the standard streams as they are."""
        _, descriptors, *_ = socket.recv_fds(self._connection, 1, 1)
        if not descriptors and self._rank != 0:
            raise LaunchError(
                f"rank {self._rank} cannot start a debugger: the launcher's standard input is not a terminal, and what "
                "it reads belongs to rank 0; run it in a terminal, or stop in rank 0 only, or use --debugpy"
            )
        return descriptors[0] if descriptors else None

    @staticmethod
    @contextmanager
    def _as_standard_streams(terminal: int | None) -> Iterator[None]:
        if terminal is None:
            yield
            return
        _flush()
        saved = [os.dup(number) for number in range(3)]
        for number in range(3):
            os.dup2(terminal, number)
        os.close(terminal)
        try:
            yield
        finally:
            _flush()
            for number, descriptor in enumerate(saved):
                os.dup2(descriptor, number)
                os.close(descriptor)


class RankPdb(pdb.Pdb):
    """Pdb that has the terminal at each of its prompts, and returns it while the program runs."""

    def __init__(self, terminal: RankTerminal) -> None:
        # Ctrl-C ends the job while the program runs, as always.
        super().__init__(nosigint=True, skip=_NOT_STEPPED_INTO)
        self._terminal = terminal

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:  # noqa: ANN401 - its type depends on the version of Python
        with self._terminal.borrowed():
            super().interaction(frame, traceback)


def set_breakpoint_hook(terminal: RankTerminal, environ: Mapping[str, str]) -> None:
    """Let `breakpoint()` start pdb with the terminal, unless PYTHONBREAKPOINT names something else."""
    pid = os.getpid()

    def hook(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as of the built-in hook
        if environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100
        if os.getpid() != pid:  # a child of the rank shares its connection
            _require_standard_input()
            return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100
        RankPdb(terminal).set_trace(sys._getframe(1))  # noqa: SLF001 - as pdb does
        return None

    sys.breakpointhook = hook
    # As of pdb.set_trace(), pdb.post_mortem(), torch.distributed.breakpoint() and code.interact().
    pdb.Pdb.interaction = _with_terminal(pdb.Pdb.interaction, terminal)  # type: ignore[method-assign]
    code.InteractiveConsole.interact = _with_terminal(code.InteractiveConsole.interact, terminal)  # type: ignore[method-assign]


def _with_terminal(prompt: Callable[..., Any], terminal: RankTerminal) -> Callable[..., Any]:
    """Return a method that shows a prompt, and has the terminal meanwhile."""
    pid = os.getpid()

    @functools.wraps(prompt)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as of the original
        if os.getpid() != pid:  # a child of the rank shares its connection
            return prompt(*args, **kwargs)
        with terminal.borrowed():
            replaced, sys.stdin = sys.stdin, sys.__stdin__  # torch has opened the rank's own input again
            try:
                return prompt(*args, **kwargs)
            finally:
                sys.stdin = replaced

    return call


def _require_standard_input() -> None:
    """Raise an error where pdb would read the end of file at its first prompt, and quit.

    Raises:
        LaunchError: Standard input is closed, or the null device, as in a worker of a data loader.
    """
    null = os.stat(os.devnull).st_rdev  # noqa: PTH116 - as of the descriptor below
    try:
        has_input = sys.stdin is not None and os.fstat(sys.stdin.fileno()).st_rdev != null
    except (OSError, ValueError):
        has_input = False
    if not has_input:
        raise LaunchError(
            f"process {os.getpid()} cannot start a debugger: a rank has started it, such as a worker of a data loader, "
            "and its standard input is empty; run this code in the rank itself (num_workers=0)"
        )


def stop_at_first_line(terminal: RankTerminal) -> None:
    """Start pdb at the first line of the main module."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:  # noqa: ANN401 - as of a trace function
        if event != "call" or frame.f_code.co_name != "<module>" or frame.f_globals.get("__name__") != "__main__":
            return None
        debugger = RankPdb(terminal)
        debugger.set_trace(frame)
        return debugger.trace_dispatch

    sys.settrace(trace)


def debug_post_mortem(terminal: RankTerminal, error: BaseException, text: str) -> None:
    """Start pdb where an exception was raised, after showing its traceback."""
    sys.settrace(None)
    if isinstance(error, (bdb.BdbQuit, KeyboardInterrupt)) or error.__traceback__ is None:
        return
    traceback: TracebackType = error.__traceback__
    debugger = RankPdb(terminal)
    debugger.reset()
    with contextlib.suppress(LaunchError, OSError), terminal.borrowed():
        sys.stderr.write(text)
        debugger.interaction(None, traceback)


def wait_for_debugpy(rank: str) -> None:
    """Listen on loopback, show how to connect, and wait for a client of debugpy."""
    debugpy: Any = importlib.import_module("debugpy")
    host, port = debugpy.listen(("127.0.0.1", 0))
    configuration = {
        "name": f"rank {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": host, "port": port},
    }
    sys.stderr.write(f"rankwise: rank {rank} waits for a debugger; add to launch.json: {json.dumps(configuration)}\n")
    _flush()
    debugpy.wait_for_client()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
