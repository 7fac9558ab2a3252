"""Launching a script, a module or a program, as a command does."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, Literal

from rankwise._arguments import as_text
from rankwise._dependencies import require_torch
from rankwise._launch.forkserver.ipc import Target, TargetKind
from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.one_host import run_on_this_host
from rankwise._launch.options import Options
from rankwise._launch.output.console import SECONDS_TO_READ, SECONDS_TO_READ_AFTER_STOP, Console
from rankwise._launch.preload import script_source
from rankwise._launch.report import exit_status
from rankwise._launch.standard_streams import open_standard_streams
from rankwise._launch.targets import NotExecutableError, check_target, read_piped
from rankwise.errors import InvalidArgumentError, RankFailedError, RankwiseError, shown

if TYPE_CHECKING:
    from rankwise._launch.one_host import MakeRendezvous

# Exit statuses of a command.
_FOUND_A_FAULT: Final = 1
_MISUSED: Final = 2
_NOT_EXECUTABLE: Final = 126
_INTERRUPTED: Final = 130

KINDS: Final = {"script": TargetKind.SCRIPT, "module": TargetKind.MODULE, "program": TargetKind.PROGRAM}


class Terminated(SystemExit):
    """The launcher got a signal to end."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(self.status)


@dataclass(frozen=True, slots=True)
class ScriptLaunch(Options):
    """A launch of a Python script, of a module or of another program, in ranks of this host.

    Made once, and then started by `run` from a program, or by `run_as_command` from a command.

    Attributes:
        target: The path of the script, or "-" for standard input; the name of the module, or the program.
        args: The arguments of the target, the same for each rank.
        nproc: The number of ranks on this host.
        kind: "script"; "module", as with `python -m`; or "program", for an executable.
        nodes: The hosts of the world, each with such a launch; None for this one alone.
        output: How the output of ranks is shown.
        max_restarts: How often all ranks are restarted after a failure.
        grace: The grace period in seconds after Ctrl-C, and for the exit of a rank whose script has failed; after
            SIGTERM, if it is longer than 30.
        preload: Modules that are imported once, for all ranks, by the process that they are forked from: names in a
            sequence or in one string, such as "sklearn,pandas"; "auto" for the installed modules that the target
            imports at its top level. True for those of RANKWISE_PRELOAD; torch always is one of them. False starts
            each rank as a new interpreter.
        ports: For one host: MASTER_PORT is the first of these ports that is free; 0 is any.
        debug: The rank that pdb stops at the first line of the target, and where an exception has ended it; None for
            none.
        debugpy: The rank that waits at the start for a debugger such as that of an editor, which connects to it over
            loopback; None for none. For this debugpy has to be installed.
        append_local_rank: Each rank gets --local_rank=N as its last argument.
        role: ROLE_NAME of the ranks.
        virtual_local_rank: LOCAL_RANK is 0 in each rank, and CUDA_VISIBLE_DEVICES names its device alone.
        signals: The signals on which `run_as_command` stops the ranks. On SIGQUIT, as by Ctrl-\\, it prints their
            stacks, unless that is one of these.
        hang_dir: The folder for files of reports: of hangs, and with the stacks of ranks; "" for that of
            RANKWISE_HANG_DIR, if it is set.

    Raises:
        InvalidArgumentError: An attribute is not as above.

    Example:
        >>> ScriptLaunch("sh", ["-c", "exit 0"], nproc=2, kind="program").run()
    """

    target: str
    args: Sequence[str] = ()
    _: KW_ONLY
    kind: Literal["script", "module", "program"] = "script"

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.kind not in tuple(KINDS):  # it may be unhashable
            raise InvalidArgumentError(f"kind={shown(self.kind)} is none of {', '.join(map(repr, KINDS))}")
        as_text(self.target, "target")
        if isinstance(self.args, (str, bytes)) or not isinstance(self.args, Sequence):
            raise InvalidArgumentError(f"args={shown(self.args)} is not a sequence of strings")
        for argument in self.args:
            as_text(argument, "an argument of the target")
        debugged = {"debug": self.debug, "debugpy": self.debugpy} if self.kind == "program" else {}
        for name, rank in debugged.items():
            if rank is not None:
                raise InvalidArgumentError(
                    f"{name}={rank} needs a Python script or module, and the target is a program"
                )

    def run(self) -> None:
        """Run the target in the ranks of this host, and return when all have ended without an error.

        Local to the caller: its environment and signal handlers do not change. Ctrl-C stops the ranks.

        Raises:
            InvalidArgumentError: There is no such script, module or program, or no such module to preload.
            RankFailedError: A rank failed, and the others were stopped; `exitcode` is that of the first one.
            MissingDependencyError: This interpreter has no torch.
            LaunchError: The ranks could not be started, or the hosts did not meet.
        """
        run_script(self, self.output.console(self.nproc), owns_descendants=False)

    def run_as_command(self, name: str) -> int:
        """Run the target as a command does that does nothing else, and return its exit status.

        Local to the caller. While it runs, SIGTERM and SIGHUP stop the ranks, and SIGQUIT prints their stacks. Errors
        are printed, and at the end every process that this one has started is killed: for the main thread of a command,
        and not for libraries.

        Args:
            name: The name of the command, which its messages begin with.

        Returns:
            0; that of the first rank that failed, 128 + N for signal N; 2 if there is no such target, and 126 if it
            cannot be executed; 128 + N after signal N to this process; 1 for other errors.
        """
        console = self.output.console(self.nproc)

        def run() -> None:
            open_standard_streams()
            start = time.monotonic()
            with terminated_by_signals(self.signals):
                run_script(self, console, owns_descendants=True)
            console.show_status(f"rankwise: {self.nproc} ranks, {time.monotonic() - start:.1f} s", last=True)

        return command_status(run, name=name, console=console)


def run_script(
    launch: ScriptLaunch,
    console: Console,
    *,
    owns_descendants: bool,
    source: bytes | None = None,
    rendezvous: MakeRendezvous | None = None,
    ranks: dict[int, LaunchedRank] | None = None,
) -> None:
    """Run a launch in this process.

    Args:
        launch: The launch.
        console: Shows the output.
        owns_descendants: This process does nothing else: it is a command, with signals of its own.
        source: The source of the script, if another process has read it.
        rendezvous, ranks: As for `run_on_this_host`.
    """
    kind = KINDS[launch.kind]
    if source is None:
        check_target(kind, launch.target)
    require_torch("starting ranks")
    if owns_descendants:
        console.show_status(f"rankwise: starting {launch.nproc} ranks")
    if source is None and kind is TargetKind.SCRIPT:
        source = read_piped(launch.target)
    run_on_this_host(
        Target(kind=kind, argv=(launch.target, *launch.args), source=source),
        launch,
        None if kind is TargetKind.PROGRAM else script_source(kind, launch.target),
        console,
        owns_descendants=owns_descendants,
        command=_own_command() if owns_descendants else (),
        rendezvous=rendezvous,
        ranks=ranks,
    )


def _own_command() -> tuple[str, ...]:
    """Return the command line of this process, as a user types it."""
    program = Path(sys.argv[0]).name
    return (program, *sys.argv[1:]) if program == "rankwise" else tuple(sys.orig_argv)


def command_status(launch: Callable[[], None], *, name: str, console: Console) -> int:
    """Launch, print the error if there is one, and return the exit status of the command."""
    status, seconds = 0, SECONDS_TO_READ
    try:
        launch()
    except RankwiseError as error:
        console.print_message(f"{name}: {error}")
        status = _status(error)
    except (KeyboardInterrupt, Terminated) as stop:
        if isinstance(stop.__cause__, RankwiseError):
            console.print_message(f"{name}: {stop.__cause__}")
        status = stop.status if isinstance(stop, Terminated) else _INTERRUPTED
        seconds = SECONDS_TO_READ_AFTER_STOP
    console.clear_status()
    try:
        lost = console.drain(seconds)
        for text in lost:
            console.print_message(f"{name}: {text}")
        console.drain(SECONDS_TO_READ_AFTER_STOP)
    except KeyboardInterrupt:
        return status or _INTERRUPTED
    return status or (_FOUND_A_FAULT if lost else 0)


def _status(error: RankwiseError) -> int:
    if isinstance(error, RankFailedError):
        return exit_status(error.failures[0])
    if isinstance(error, NotExecutableError):
        return _NOT_EXECUTABLE
    return _MISUSED if isinstance(error, InvalidArgumentError) else _FOUND_A_FAULT


@contextmanager
def terminated_by_signals(signals: Sequence[int]) -> Iterator[None]:
    """Raise `Terminated` in this block when one of these signals arrives."""

    def terminate(number: int, _: FrameType | None) -> None:
        for other in handled:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(number)

    # A signal that is ignored at the start, such as SIGHUP under nohup, stays ignored here and in ranks.
    handled = [number for number in signals if number != signal.SIGINT and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, terminate) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
