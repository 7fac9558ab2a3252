"""`rankwise.launch`: ranks that run a Python function, and their return values."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from rankwise._dependencies import require_torch
from rankwise._launch.forkserver.ipc import TargetKind
from rankwise._launch.function_call import FunctionCall
from rankwise._launch.output import Console
from rankwise._launch.resource_limits import convert_resource_errors
from rankwise._launch.spec import LaunchSpec, check_nproc, common_environ
from rankwise._launch.supervisor import Supervisor
from rankwise._pickling import loads
from rankwise._rendezvous.nodes import Nodes
from rankwise.errors import InvalidArgumentError, shown

R = TypeVar("R")


def launch(fn: Callable[..., R], *args: Any, nproc: int) -> list[R]:  # noqa: ANN401 - the function's own arguments
    """Run a function in `nproc` new processes on this host, as the ranks of one world, and return their results.

    Local to the caller: its own session, environment and signal handlers do not change. In the ranks,
    `rankwise.init()` joins the world. Each rank imports the caller's script, as a process that `multiprocessing`
    spawns does: call this function below `if __name__ == "__main__":`. Lambdas and closures are pickled by value, and
    so are the definitions of a notebook and of a script without such a guard. The output of ranks is shown at once.

    Args:
        fn: The function that each rank runs.
        *args: The arguments of the function, the same in each rank.
        nproc: The number of ranks.

    Returns:
        The results, by rank.

    Raises:
        InvalidArgumentError: `nproc` is not a number of processes that this host could run, `fn` is no function, or
            the function or an argument cannot be pickled.
        RankFailedError: A rank failed, and the others were stopped; the original exception is its cause.
        MissingDependencyError: This interpreter has no torch.
        LaunchError: The ranks could not be started; or this process is a rank that imports the script, where no guard
            protects this call.

    Example:
        >>> import rankwise
        >>> rankwise.launch(lambda x: x * rankwise.get_rank(), 10, nproc=2)
        [0, 10]
    """
    nproc = check_nproc(nproc)
    if not callable(fn):
        raise InvalidArgumentError(f"launch takes a function and its arguments, got {shown(fn)}")
    return launch_call(FunctionCall.of(fn, args), nproc=nproc)


def launch_call(
    call: FunctionCall, *, nproc: int, nodes: Nodes | None = None, console: Console | None = None
) -> list[Any]:
    """Call a function in the ranks of this host, and return their results, by rank.

    Args:
        call: The function and its arguments.
        nproc: The number of ranks on this host.
        nodes: The hosts of the world, each with its own launcher; None if it is this one alone.
        console: Shows the output of the ranks.

    Raises:
        InvalidArgumentError, RankFailedError, LaunchError: As `launch` does.
    """
    nproc = check_nproc(nproc)
    require_torch("starting ranks")
    environ = common_environ(nproc, one_host=nodes is None)
    argv = tuple(map(str, getattr(sys, "argv", ())))
    spec = LaunchSpec(
        nproc=nproc, kind=TargetKind.FUNCTION, argv=argv, call=pickle.dumps(call), nodes=nodes, environ=environ
    )
    with convert_resource_errors(), Supervisor(environ, console=console or Console(nproc=nproc)) as supervisor:
        from rankwise._launch.agent import run_ranks  # noqa: PLC0415 - imports torch while the fork server does

        ranks = run_ranks(spec, supervisor)
    return [loads(ranks[rank].result.value) for rank in sorted(ranks)]  # type: ignore[union-attr]  # all have returned
