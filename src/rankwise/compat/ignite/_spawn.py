"""Ignite's `spawn`: a function run in new processes, by rankwise's launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from rankwise.compat.ignite._initialize import InitMethod, check_backend, join, record_init_method, timeout_seconds
from rankwise.compat.ignite._install import install, is_installed
from rankwise.compat.ignite._model_backends import XLA_TPU
from rankwise.compat.ignite._queries import get_local_rank
from rankwise.errors import InvalidArgumentError
from rankwise.extend._dropins import integer

if TYPE_CHECKING:
    from rankwise.launching import Nodes

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
    """Run `fn(local_rank, *args, **kwargs_dict)` in new processes, each of which has joined the world.

    Local to the caller. The function may be any that cloudpickle can serialize, also a lambda or one of a notebook. The
    first rank that fails is named, and the others are stopped.

    Args:
        backend: As for `initialize`.
        fn: The function that each rank runs; its result is discarded.
        args: The positional arguments after the local rank.
        kwargs_dict: The keyword arguments.
        nproc_per_node: The number of ranks on this host; for "xla-tpu" that of its XLA devices.
        kwargs: `nnodes`, `node_rank`, `master_addr`, `master_port` for several hosts, each of which makes this call;
            `timeout`, as for `initialize`; `join=False` to return at once, while a thread supervises the ranks.
            `init_method` may be "tcp://host:port" in place of the last two for several hosts. `daemon` and
            `start_method` are ignored: ranks end with their launcher, and are forked from a process that has loaded
            torch and no other package. For "xla-tpu" the numbers and addresses of hosts are ignored: each host of a pod
            makes this call.

    Raises:
        InvalidArgumentError: An argument cannot be used, or the function cannot be serialized.
        RankFailedError: A rank failed, and the others were stopped; the original exception is its cause.
        LaunchError: The ranks could not be started.

    Example:
        >>> spawn("gloo", lambda local_rank: None, ())
    """
    unknown = sorted(set(kwargs) - set(_ACCEPTED))
    if unknown:
        raise InvalidArgumentError(f"spawn takes no {', '.join(unknown)}; for gloo and nccl: {', '.join(_ACCEPTED)}")
    check_backend(backend)
    from rankwise.launching import FunctionLaunch  # noqa: PLC0415 - not on Windows, where the rest works

    nproc = check_nproc_per_node(nproc_per_node)
    is_xla = backend == XLA_TPU
    nodes = None if is_xla else nodes_of(kwargs)  # torch_xla knows the hosts of a pod
    join_arguments = {"timeout": timeout_seconds(kwargs.get("timeout"))}
    rank = (_run_rank, (backend, join_arguments, kwargs.get("init_method"), fn, tuple(args), dict(kwargs_dict or {})))
    setup = install if is_installed() else None  # the function may import Ignite
    run = FunctionLaunch(*rank, nproc=nproc, nodes=nodes, setup=setup, backend="xla" if is_xla else None).run
    if kwargs.get("join", True):
        run()
    else:
        threading.Thread(target=run, name="rankwise-spawn").start()


def _run_rank(
    backend: str,
    join_arguments: dict[str, Any],
    init_method: str | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    with join(backend, join_arguments) as session:
        record_init_method(session, init_method)  # a rank of the launcher needs none to meet the others
        fn(get_local_rank(), *args, **kwargs)


def nodes_of(kwargs: Mapping[str, Any]) -> Nodes | None:
    """Return the hosts of the world; None for this host alone, whose ranks need no endpoint.

    Raises:
        InvalidArgumentError: The numbers are out of range, or several hosts have no endpoint.
    """
    nnodes = kwargs.get("nnodes", 1)
    count = integer(nnodes)
    if count is None or count < 1:
        raise InvalidArgumentError(f"Argument nnodes should positive, a whole number, but given {nnodes!r}")
    given = kwargs.get("node_rank", 0 if count == 1 else None)
    if given is None:
        raise InvalidArgumentError("If number of nodes larger than one, arguments node_rank should be given")
    node_rank = integer(given)
    if node_rank is None or not 0 <= node_rank < count:
        raise InvalidArgumentError(f"Argument node_rank should be between 0 and {count - 1}, but given {given!r}")
    method = InitMethod.parse(kwargs.get("init_method"))
    host, port = kwargs.get("master_addr"), kwargs.get("master_port")
    if method.address or method.path:
        for name, value in (("master_addr", host), ("master_port", port)):
            if value is not None:
                raise InvalidArgumentError(
                    f"{name} should be None if init_method is provided other then 'env://': init_method="
                    f"{kwargs.get('init_method')!r} is the endpoint already; got {value!r}"
                )
    if count == 1:
        return None
    address = method.address or (f"{host}:{port}" if host and port else "")
    if not address:
        raise InvalidArgumentError(
            "If number of nodes larger than one, arguments master_addr and master_port should be specified, a free "
            f"port of the first host, the same on all, but given master_addr={host!r}, master_port={port!r} and "
            f"init_method={kwargs.get('init_method')!r}"
        )
    from rankwise.launching import Nodes  # noqa: PLC0415 - not on Windows, where the rest works

    return Nodes(num_nodes=count, node_rank=node_rank, address=address, run_id="ignite")


def check_nproc_per_node(count: object) -> int:
    """Return a number of ranks on this host, checked.

    Raises:
        InvalidArgumentError: The number is not an integer from 1 to the limit of this host.
    """
    nproc = integer(count)
    if nproc is None or nproc < 1:
        raise InvalidArgumentError(f"Argument nproc_per_node should positive, a whole number, but given {count!r}")
    from rankwise.launching import check_nproc  # noqa: PLC0415 - not on Windows, where the rest works

    return check_nproc(nproc)
