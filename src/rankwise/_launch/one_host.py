"""The ranks of this host, from the start of its fork server to their end: the same for scripts and functions, and
whether there are other hosts or not.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from rankwise._dependencies import import_torch, require_torch
from rankwise._launch.console import Console
from rankwise._launch.forkserver.client import ForkServer
from rankwise._launch.forkserver.ipc import TargetKind
from rankwise._launch.forwarded_signals import forwarded_signals
from rankwise._launch.function_call import FunctionCall
from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.preload import MainSource, Preload, preloaded_modules
from rankwise._launch.rank_stacks import HANG_DIR
from rankwise._launch.resource_limits import convert_resource_errors
from rankwise._launch.spec import LaunchSpec, check_nproc, common_environ
from rankwise._launch.supervisor import Supervisor
from rankwise._rendezvous.nodes import Nodes
from rankwise.errors import InvalidArgumentError, shown

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    MakeRendezvous: TypeAlias = Callable[[], RendezvousHandler]


def run_on_this_host(
    spec: LaunchSpec,
    console: Console,
    start_server: Callable[[], ForkServer],
    *,
    forwarded: Sequence[int] | None = None,
    rendezvous: MakeRendezvous | None = None,
    ranks: dict[int, LaunchedRank] | None = None,
) -> dict[int, LaunchedRank]:
    """Run ranks to their end, and return them.

    Args:
        spec: The ranks.
        console: Shows their output.
        start_server: Starts the fork server.
        forwarded: For a command, whose signals are about its ranks: those that stop them. None in a program.
        rendezvous: Makes the rendezvous, once torch may be imported; None for that of the spec.
        ranks: Gets the ranks, also if this raises.

    Raises:
        RankFailedError: A rank failed, and the others were stopped.
        LaunchError: The ranks could not be started, or the hosts did not meet.
    """
    hang_dir = spec.environ.get(HANG_DIR, "")
    with (
        convert_resource_errors(),
        Supervisor(start_server, console=console, hang_dir=hang_dir) as supervisor,
        nullcontext() if forwarded is None else forwarded_signals(supervisor, forwarded),
    ):
        import_torch()  # while the fork server does
        from rankwise._launch.attempts import run_ranks  # noqa: PLC0415

        try:
            return run_ranks(spec, supervisor, None if rendezvous is None else rendezvous())
        finally:
            if ranks is not None:
                ranks.update(supervisor.ranks)


def function_spec(
    fn: Callable[..., Any], args: Sequence[Any], *, nproc: int | None, nodes: Nodes | None, setup: str = ""
) -> LaunchSpec:
    """Return the ranks that run a function, which is pickled here; `setup` is "module:function", called first in each.

    Raises:
        InvalidArgumentError: An argument cannot be used, or cannot be pickled.
        LaunchError: This process is a rank that imports the script, where no guard protects this call.
    """
    number = check_nproc(nproc)  # type: ignore[arg-type]  # None is refused
    if not callable(fn):
        raise InvalidArgumentError(f"launch takes a function and its arguments, got {shown(fn)}")
    return LaunchSpec(
        nproc=number,
        kind=TargetKind.FUNCTION,
        argv=tuple(map(str, getattr(sys, "argv", ()))),
        call=pickle.dumps(FunctionCall.of(fn, tuple(args), setup=setup)),
        nodes=nodes,
    )


def run_function(
    spec: LaunchSpec,
    preload: Preload,
    main: MainSource,
    console: Console,
    *,
    owns_descendants: bool = False,
    **others: Any,  # noqa: ANN401 - arguments of `run_on_this_host`
) -> dict[int, LaunchedRank]:
    """Run a function in ranks of this host to their end, and return them.

    Args:
        spec: The ranks.
        preload, main: The modules that they inherit, as users name them, and the program of the caller.
        console: Shows their output.
        owns_descendants: This process does nothing else.
        **others: As for `run_on_this_host`.
    """
    require_torch("starting ranks")
    environ = common_environ(spec.nproc, one_host=spec.nodes is None)
    modules = preloaded_modules(preload, environ, main)
    start_server = partial(ForkServer, environ, preload=modules, owns_descendants=owns_descendants)
    return run_on_this_host(replace(spec, environ=environ), console, start_server, **others)
