"""Ignite's `spawn`: a function in new processes, through rankwise's launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from rankwise.compat.ignite.identity import get_local_rank
from rankwise.compat.ignite.installing import install, is_installed
from rankwise.compat.ignite.joining import Method, check_backend, join, seconds
from rankwise.errors import InvalidArgumentError
from rankwise.launch.call import FunctionCall
from rankwise.launch.functions import launch_call
from rankwise.launch.plan import Nodes, check_nproc

_ACCEPTED: Final = (
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "init_method",
    "timeout",
    "join",
    "daemon",
    "start_method",
)


def spawn(
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs_dict: Mapping[str, Any] | None = None,
    nproc_per_node: int = 1,
    **kwargs: Any,  # noqa: ANN401 - Ignite's signature
) -> None:
    """Run `fn(local_rank, *args, **kwargs_dict)` in new processes that have joined each other.

    Local to the caller. The function may be anything that cloudpickle can carry, a lambda or a notebook's. The first
    rank that fails ends the others, and is named.

    Args:
        backend: As for `initialize`.
        fn: What each rank runs; what it returns is dropped.
        args: What it is called with after the local rank.
        kwargs_dict: What it is called with by name.
        nproc_per_node: How many ranks on this host.
        kwargs: `nnodes`, `node_rank`, `master_addr`, `master_port` where there are several hosts, each of which calls
            this; `timeout`, as for `initialize`; `join=False` to come back at once, while a thread looks after the
            ranks. `init_method` may be a "tcp://host:port" instead of the last two of several hosts. `daemon` and
            `start_method` mean nothing here: ranks end with their launcher, and are forked from a process that has
            loaded torch and nothing else.

    Raises:
        InvalidArgumentError: An argument cannot be used, or the function cannot be carried to other processes.
        RankFailedError: A rank failed, and the others were stopped; the original exception is its cause.
        LaunchError: The ranks could not be started.

    Example:
        >>> spawn("gloo", lambda local_rank: None, ())
    """
    unknown = sorted(set(kwargs) - set(_ACCEPTED))
    if unknown:
        raise InvalidArgumentError(f"spawn takes no {', '.join(unknown)}; for gloo and nccl: {', '.join(_ACCEPTED)}")
    check_backend(backend)
    check_nproc(nproc_per_node)
    nodes = nodes_of(kwargs)
    joining = {"timeout": seconds(kwargs.get("timeout"))}
    # Before the function is read, which may import Ignite.
    setup = f"{install.__module__}:{install.__name__}" if is_installed() else ""
    call = FunctionCall.of(_be_rank, (backend, joining, fn, tuple(args), dict(kwargs_dict or {})), setup=setup)

    def run() -> None:
        launch_call(call, nproc=nproc_per_node, nodes=nodes)

    if kwargs.get("join", True):
        run()
    else:
        threading.Thread(target=run, name="rankwise-spawn").start()


def _be_rank(
    backend: str, joining: dict[str, Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with join(backend, joining):
        fn(get_local_rank(), *args, **kwargs)


def nodes_of(kwargs: Mapping[str, Any]) -> Nodes | None:
    """Return the hosts of the world; None for this one alone, whose ranks need no place to meet.

    Raises:
        InvalidArgumentError: There can be no such host, or nobody says where hosts meet.
    """
    count, node_rank = kwargs.get("nnodes", 1), kwargs.get("node_rank", 0)
    if not isinstance(count, int) or not isinstance(node_rank, int) or not 0 <= node_rank < count:
        raise InvalidArgumentError(f"node_rank={node_rank!r} is not one of nnodes={count!r} hosts")
    method = Method.parse(kwargs.get("init_method"))
    host, port = kwargs.get("master_addr"), kwargs.get("master_port")
    if count == 1:
        return None
    if (method.address or method.path) and not (host is None and port is None):
        raise InvalidArgumentError(
            f"init_method={kwargs.get('init_method')!r} says where hosts meet: leave master_addr and master_port out"
        )
    endpoint = method.address or (f"{host}:{port}" if host and port else "")
    if not endpoint:
        raise InvalidArgumentError(
            f"nnodes={count} needs to know where the hosts meet: pass master_addr and master_port, a free port of the "
            f"first host, the same on all (got master_addr={host!r}, master_port={port!r}, "
            f"init_method={kwargs.get('init_method')!r})"
        )
    return Nodes(least=count, most=count, backend="static", endpoint=endpoint, run_id="ignite", node_rank=node_rank)
