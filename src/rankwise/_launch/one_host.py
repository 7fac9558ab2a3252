"""The ranks of this host, from the start of its fork server to their end: the same for scripts and functions, and
whether there are other hosts or not.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from rankwise._dependencies import import_torch, require_torch
from rankwise._launch.forkserver.client import ForkServer
from rankwise._launch.forkserver.ipc import Target, TargetKind
from rankwise._launch.forwarded_signals import forwarded_signals
from rankwise._launch.function_call import FunctionCall
from rankwise._launch.interrupts import Interrupts
from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.options import Options
from rankwise._launch.output.console import Console
from rankwise._launch.preload import MainSource, preloaded_modules
from rankwise._launch.rank_stacks import HANG_DIR
from rankwise._launch.resource_limits import convert_resource_errors
from rankwise._launch.spec import LaunchSpec, rank_environ, without_warnings_of_torch
from rankwise._launch.supervisor import Supervisor
from rankwise.errors import InvalidArgumentError, shown

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    MakeRendezvous: TypeAlias = Callable[[], RendezvousHandler]


def run_on_this_host(
    target: Target,
    options: Options,
    main: MainSource | None,
    console: Console,
    *,
    owns_descendants: bool = False,
    command: Sequence[str] = (),
    rendezvous: MakeRendezvous | None = None,
    ranks: dict[int, LaunchedRank] | None = None,
    interrupts: Interrupts | None = None,
) -> dict[int, LaunchedRank]:
    """Run ranks to their end, and return them.

    Args:
        target: What each rank runs.
        options: The options of the launch.
        main: The program whose imports they inherit with preload="auto"; None for an executable, which inherits none.
        console: Shows their output.
        owns_descendants: This process does nothing else: it is a command, whose signals are about its ranks.
        command: The command line of this process, if it is a command that other hosts need too.
        rendezvous: Makes the rendezvous, once torch may be imported; None for that of the options.
        ranks: Gets the ranks, also if this raises.
        interrupts: Raises KeyboardInterrupt here from another thread.

    Raises:
        InvalidArgumentError: There is no such module to preload.
        RankFailedError: A rank failed, and the others were stopped.
        LaunchError: The ranks could not be started, or the hosts did not meet.
    """
    require_torch("starting ranks")
    environ = rank_environ(options)
    spec = LaunchSpec(target=target, options=options, environ=environ, command=tuple(command))

    def start_server() -> ForkServer:
        modules = None if main is None else preloaded_modules(options.preload, environ, main)
        return ForkServer(environ, preload=modules, owns_descendants=owns_descendants)

    with (
        convert_resource_errors(),
        Supervisor(start_server, console=console, hang_dir=environ.get(HANG_DIR, "")) as supervisor,
        forwarded_signals(supervisor, options.signals) if owns_descendants else nullcontext(),
    ):
        if interrupts is not None:
            supervisor.obey(interrupts)
        with without_warnings_of_torch() if owns_descendants else nullcontext():
            import_torch()  # while the fork server does
        from rankwise._launch.attempts import run_ranks  # noqa: PLC0415

        try:
            return run_ranks(spec, supervisor, None if rendezvous is None else rendezvous())
        finally:
            if ranks is not None:
                ranks.update(supervisor.ranks)


def function_target(fn: Callable[..., Any], args: Sequence[Any], *, setup: str = "") -> Target:
    """Return a function as the target of ranks, which is pickled here.

    Args:
        fn, args: The function and its arguments.
        setup: "module:function", which each rank calls first; "" for none.

    Raises:
        InvalidArgumentError: It is no function, or cannot be pickled.
        LaunchError: This process is a rank that imports the script, where no guard protects this call.
    """
    if not callable(fn):
        raise InvalidArgumentError(f"launch takes a function and its arguments, got {shown(fn)}")
    argv = tuple(map(str, getattr(sys, "argv", ())))
    call = pickle.dumps(FunctionCall.of(fn, tuple(args), setup=setup))
    return Target(kind=TargetKind.FUNCTION, argv=argv, call=call)
