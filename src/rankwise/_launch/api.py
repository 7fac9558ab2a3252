"""Starting ranks that run a Python function, and getting back what it returned."""

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
    """Run a function in `nproc` new processes on this host, as the ranks of one world, and return what each returned.

    Local to the caller, whose own session, environment and signal handlers stay as they are. In the ranks,
    `rankwise.init()` joins them to each other. Ranks import the script that the caller is, as processes that
    `multiprocessing` spawns do: call this below `if __name__ == "__main__":`. Lambdas and closures go by value, and so
    does what a script without such a guard or a notebook defines. What ranks print is shown as it comes.

    Args:
        fn: What each rank runs.
        *args: What it is called with, the same in each rank.
        nproc: How many ranks.

    Returns:
        The results, by rank.

    Raises:
        InvalidArgumentError: `nproc` is not a number of processes that this host could run, `fn` is no function, or
            it or an argument cannot be pickled.
        RankFailedError: A rank failed, and the others were stopped; the original exception is its cause.
        MissingDependencyError: This interpreter has no torch.
        LaunchError: The ranks could not be started; or this process is one that imports the script, in which nothing
            guards this call.

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
    call: FunctionCall, *, nproc: int, nodes: Nodes | None = None, screen: Console | None = None
) -> list[Any]:
    """Call a function as the ranks of this host, and return what each of them returned, by rank.

    Args:
        call: What each rank calls.
        nproc: How many ranks.
        nodes: The other hosts of the world, where a launcher runs too; there are none by default.
        screen: Where what they print is shown, and how.

    Raises:
        InvalidArgumentError, RankFailedError, LaunchError: As `launch` does.
    """
    nproc = check_nproc(nproc)
    require_torch("starting ranks")
    environ = common_environ(nproc, one_host=nodes is None)
    argv = tuple(map(str, getattr(sys, "argv", ())))
    plan = LaunchSpec(
        nproc=nproc, kind=TargetKind.FUNCTION, argv=argv, call=pickle.dumps(call), nodes=nodes, environ=environ
    )
    with convert_resource_errors(), Supervisor(environ, screen=screen or Console(nproc=nproc)) as pool:
        from rankwise._launch.agent import run_ranks  # noqa: PLC0415 - imports torch while the fork server does

        ranks = run_ranks(plan, pool)
    return [loads(ranks[rank].result.value) for rank in sorted(ranks)]  # type: ignore[union-attr]  # all returned
