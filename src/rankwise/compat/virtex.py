"""A drop-in for `virtex.utils.distributed`: `from rankwise.compat import virtex as dist`.

As in the original, collectives are no-ops alone. Unlike there, the rank is right before joining, no GPU is needed, and
values that cannot be averaged are left unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

import rankwise
from rankwise import is_joined
from rankwise.errors import InvalidArgumentError, PayloadTypeError
from rankwise.extend._dropins import dumps, integer, overwrite
from rankwise.extend.collectives import collective, describe

log = logging.getLogger(__name__)

# The `dist_url` of ranks that `launch` started: they read their environment.
_ENVIRONMENT: Final = "env://"
_TCP: Final = "tcp://"
# Torch's own: the original sets none.
_TIMEOUT: Final = 1800.0
_MEBIBYTE: Final = 1 << 20


def launch(
    job_fn: Callable[..., Any],
    num_machines: int = 1,
    num_gpus_per_machine: int = 1,
    machine_rank: int = 0,
    dist_url: str = "tcp://127.0.0.1:23456",
    args: Any = (),  # noqa: ANN401 - the original's signature
) -> list[Any]:
    """Run a function as ranks, one for each GPU, or on the CPU; call it once on each machine.

    Local. The function runs in ranks that have joined; when the first one fails, the others are stopped. A world of one
    runs in this process. Ranks of one machine need no port, so `dist_url` is ignored for one machine.

    Args:
        job_fn: A function that cloudpickle can serialize; any function in a world of one.
        num_machines: The number of machines.
        num_gpus_per_machine: The number of ranks on each.
        machine_rank: The index of this machine.
        dist_url: "tcp://host:port" of a free port on the first machine, the same on all.
        args: The arguments of the function.

    Returns:
        The results of this machine's ranks, by rank; None, with a warning, for a result that cannot be pickled.

    Raises:
        InvalidArgumentError: An argument cannot be used.
        RankFailedError: A rank failed, and the others were stopped; the original exception is its cause.
        LaunchError: The rendezvous of the machines failed, or the ranks could not be started.

    Example:
        >>> launch(lambda start: start + get_world_size(), args=(10,))
        [11]
    """
    from rankwise.launching import Nodes, Output, check_nproc  # noqa: PLC0415 - not on Windows, where the rest works

    num_gpus_per_machine = check_nproc(num_gpus_per_machine)
    if (integer(num_machines) or 0) < 1:
        raise InvalidArgumentError(f"num_machines={num_machines!r} is not a number of machines")
    if (index := integer(machine_rank)) is None or not 0 <= index < num_machines:
        raise InvalidArgumentError(f"machine_rank={machine_rank!r} is not one of {num_machines}, counted from 0")
    num_machines, machine_rank = int(num_machines), index
    world_size = num_machines * num_gpus_per_machine
    if world_size == 1:
        return [_job_worker(0, job_fn, 1, 1, 0, _ENVIRONMENT, args)]
    nodes = None
    if num_machines > 1:
        address = _address(dist_url)
        nodes = Nodes(num_nodes=num_machines, node_rank=machine_rank, address=address, run_id=address)
    job = (job_fn, world_size, num_gpus_per_machine, machine_rank, tuple(args))
    # Lines have no prefix, for programs of this kind print their rank themselves.
    return rankwise.launch(_run_job, *job, nproc=num_gpus_per_machine, nodes=nodes, output=Output(prefix=False))


def _job_worker(
    local_rank: int,
    job_fn: Callable[..., Any],
    world_size: int,
    num_gpus_per_machine: int,
    machine_rank: int,
    dist_url: str,
    args: tuple[Any, ...],
) -> Any:  # noqa: ANN401 - the function's result
    """Run one rank: set its device, join, call the function, and leave, also if it raised.

    Collective over the world. `launch` runs it, and so may a program that starts its ranks itself.

    Raises:
        InvalidArgumentError: `dist_url` is neither "tcp://host:port" nor "env://".
        JoinError: The rendezvous failed.
    """
    with rankwise.init(
        rank=machine_rank * num_gpus_per_machine + local_rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=num_gpus_per_machine,
        timeout=_TIMEOUT,
        address=None if dist_url == _ENVIRONMENT else _address(dist_url),
    ):
        return job_fn(*args)


def synchronize() -> None:
    """Wait until every rank has entered the barrier.

    Collective over the session; a no-op without one.
    """
    if is_joined():
        rankwise.barrier()


def get_world_size() -> int:
    """Return the number of ranks; 1 alone.

    Local. It is right before joining too, under any launcher.
    """
    return rankwise.get_world_size()


def get_rank() -> int:
    """Return this process's rank; 0 alone.

    Local. It is right before joining too, under any launcher.
    """
    return rankwise.get_rank()


def is_master_process() -> bool:
    """Return whether this is rank zero; True alone.

    Local. It is True in one process only, before joining too.
    """
    return rankwise.is_rank_zero()


def average_across_processes(t: torch.Tensor | dict[str, torch.Tensor]) -> None:
    """Replace a tensor, or the tensors in a dict, by their mean over all ranks, in place.

    Collective over the session; a no-op without one and, as in the original, for a value that is neither a tensor nor a
    dict. All tensors of a dict, and of the dicts in it, are sent in one collective, and matched by key in any order.

    Raises:
        PayloadTypeError: A value in a dict is not a tensor, or a tensor is of integers, which cannot hold a mean. All
            tensors are left unchanged, on all ranks.
        MismatchError: The ranks' keys, shapes or types differ.

    Example:
        >>> loss = torch.tensor(0.5)
        >>> average_across_processes({"loss": loss})
        >>> loss
        tensor(0.5000)
    """
    if not is_joined() or not isinstance(t, (torch.Tensor, dict)):
        return
    with collective("average_across_processes"):
        for leaf in _tensors(t):
            _check(leaf)
    if isinstance(t, torch.Tensor):
        has_graph = t.requires_grad and not t.is_leaf
        means = rankwise.all_reduce_(t.detach().clone() if has_graph else t.detach(), op="mean")
        if not has_graph:
            return
    else:
        means = rankwise.all_reduce(_with_plain_dicts(t), op="mean")
    _write_means(means, t, rankwise.get_world_size())


def gpu_mem_usage() -> int:
    """Return how much memory of this rank's GPU is in use now, in MiB; 0 without a GPU.

    Local. It is the total that nvidia-smi shows: memory of torch, of NCCL and CUDA themselves, and of other programs.
    Before this process has used the GPU it is 0, since a query would allocate memory there.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0
    free, total = torch.cuda.mem_get_info()
    return (total - free) // _MEBIBYTE


def _run_job(job_fn: Callable[..., Any], world_size: int, ranks_here: int, machine: int, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Run a rank that `launch` has started, and return its result, or None if that cannot be pickled."""
    result = _job_worker(rankwise.get_local_rank(), job_fn, world_size, ranks_here, machine, _ENVIRONMENT, args)
    try:
        dumps(result)
    except Exception as error:  # noqa: BLE001 - a user's class may raise any exception when it is pickled
        log.warning(
            "rank %d returned a value that cannot be pickled, so launch() returns None for it: %s",
            rankwise.get_rank(),
            error,
        )
        return None
    return result


def _address(dist_url: str) -> str:
    """Return "host:port".

    Raises:
        InvalidArgumentError: The URL is not tcp://host:port.
    """
    address = str(dist_url).removeprefix(_TCP)
    if not str(dist_url).startswith(_TCP):
        raise InvalidArgumentError(f"dist_url={dist_url!r} is not tcp://host:port")
    from rankwise.launching import Nodes  # noqa: PLC0415 - not on Windows, where the rest works

    try:
        Nodes(num_nodes=1, address=address)  # which checks it
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"dist_url={dist_url!r} is not tcp://host:port with a port from 1 to 65535"
        ) from error
    return address


def _tensors(value: Any) -> Iterator[Any]:  # noqa: ANN401 - its type is checked here
    """Yield the values of a dict, and of the dicts in it."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    else:
        yield value


def _with_plain_dicts(value: Any) -> Any:  # noqa: ANN401 - its type is checked here
    """Return dicts of any class as plain ones, with keys that can be matched between ranks."""
    return {_key(key): _with_plain_dicts(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _key(key: object) -> object:
    return key if isinstance(key, (str, int)) else repr(key)


def _write_means(means: Any, value: Any, world_size: int) -> None:  # noqa: ANN401 - of the same structure, and checked
    if isinstance(value, dict):
        for key, inner in value.items():
            _write_means(means[_key(key)], inner, world_size)
        return
    if value.requires_grad and not value.is_leaf:
        value /= world_size  # so that the gradient is that of this rank's share, as in the original
    overwrite(value, means)


def _check(value: object) -> None:
    """Check that a value can be replaced by its mean.

    Raises:
        PayloadTypeError: The value is not a tensor, or its type cannot hold a mean.
    """
    if not isinstance(value, torch.Tensor):
        raise PayloadTypeError(
            f"average_across_processes changes tensors and dicts of them in place, got {describe(value)}; "
            "rankwise.all_reduce(value, op='mean') returns the mean of any value"
        )
    if not (value.is_floating_point() or value.is_complex()):
        raise PayloadTypeError(
            f"a tensor of {value.dtype} cannot hold a mean; average tensor.float(), "
            "or use the result of rankwise.all_reduce(tensor, op='mean')"
        )
