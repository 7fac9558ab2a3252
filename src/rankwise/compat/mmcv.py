"""A drop-in for `mmcv.runner.dist_utils`: `from rankwise.compat.mmcv import init_dist, get_dist_info`.

The only module of rankwise that writes this process's environment, since programs that call `init_dist` read it there.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, ParamSpec, TypeVar

import torch

import rankwise
from rankwise import Session, is_joined
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError, PayloadTypeError
from rankwise.extend._dropins import called_on_rank_zero, check_reducible, check_writable, launch_environment, overwrite
from rankwise.extend.collectives import Members, collective, describe

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# The launchers of each name, and the advice if none of them started this process.
_LAUNCHERS: Final = {
    "pytorch": (
        ("override", "rankwise", "accelerate", "torchrun", "ray", "deepspeed", "plain", "lightning"),
        "start it with torchrun, or set RANK and WORLD_SIZE",
    ),
    "mpi": (
        ("azureml", "openmpi", "intelmpi", "mpich", "mvapich2", "mvapich3", "platformmpi", "pals", "mpt", "pmi"),
        "start it with mpirun or mpiexec",
    ),
    "slurm": (("slurm",), "start it with srun"),
}
# Torch's own: the original sets none.
_TIMEOUT: Final = 1800.0
# The size of the buckets into which small tensors are copied, unless the caller specifies it.
_BUCKET_MB: Final = 64
_MEBIBYTE: Final = 1 << 20
# The sum of these may overflow, so their mean is computed in another type.
_HALVES: Final = {torch.float16, torch.bfloat16}
_LOOPBACK: Final = "127.0.0.1"


def init_dist(launcher: str, backend: str | None = "nccl", **kwargs: Any) -> None:  # noqa: ANN401 - each is checked
    """Join the world that a launcher started this process into, and write this rank's variables to the environment.

    Collective over the world. It sets MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK in `os.environ`, and
    does not change the start method of multiprocessing.

    Args:
        launcher: "pytorch", "mpi" or "slurm"; "auto" to detect the launcher, or none; "none" to join nothing.
        backend: In torch's notation; None for torch's own choice. "nccl" without a GPU is gloo.
        **kwargs: `timeout`, seconds or a timedelta; `port` of rank zero; `rank`, `world_size` or both; `init_method`,
            "env://" or "tcp://host:port".

    Raises:
        InvalidArgumentError: There is no such launcher, or an argument cannot be used.
        LauncherEnvironmentError: That launcher did not start this process, or its variables cannot be used.
        JoinError: The rendezvous failed.
    """
    if launcher == "none":
        return
    if launcher != "auto" and launcher not in _LAUNCHERS:
        raise InvalidArgumentError(
            f"Invalid launcher type: {launcher}; it is none of {', '.join(_LAUNCHERS)}, auto, none"
        )
    _join(launcher, backend, **kwargs)


def _init_dist_pytorch(backend: str | None, **kwargs: Any) -> None:  # noqa: ANN401 - as for init_dist
    """Join under torchrun, or where RANK is set. Collective over the world."""
    _join("pytorch", backend, **kwargs)


def _init_dist_mpi(backend: str | None, **kwargs: Any) -> None:  # noqa: ANN401 - as for init_dist
    """Join under Open MPI, MPICH or Intel MPI. Collective over the world."""
    _join("mpi", backend, **kwargs)


def _init_dist_slurm(backend: str | None, port: int | None = None) -> None:
    """Join under srun, at `port`, or at one derived from the job's id. Collective over the world."""
    _join("slurm", backend, port=port)


def get_dist_info() -> tuple[int, int]:
    """Return this process's rank and the world size; (0, 1) alone.

    Local. They are right before `init_dist` too.

    Example:
        >>> get_dist_info()
        (0, 1)
    """
    return rankwise.get_rank(), rankwise.get_world_size()


def master_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that runs on rank zero only, and returns None on the others.

    Local: no rank waits for another. `rankwise.one_rank_only` makes the others wait, and can return them the result.

    Example:
        >>> master_only(len)("four")
        4
    """
    return called_on_rank_zero(func)


def allreduce_params(params: Iterable[torch.Tensor], coalesce: bool = True, bucket_size_mb: int = -1) -> None:
    """Replace parameters or buffers by their mean over all ranks, in place.

    Collective over the session; a no-op alone, or without a session. Means of integers, such as the counters of batch
    norms, are rounded; half precision is averaged in float32.

    Args:
        params: Tensors of the same shapes and types on all ranks, in the same order.
        coalesce: Send small tensors together, in buckets.
        bucket_size_mb: The size of a bucket in MiB; a default if it is not above 0.

    Raises:
        MismatchError: The ranks' tensors differ in number, shape or type; none is changed then.
        PayloadTypeError: A tensor is not dense, or its type has no mean.
    """
    if is_joined() and rankwise.get_world_size() > 1:
        nbytes = _bucket_bytes(bucket_size_mb) if coalesce else 0
        _average("allreduce_params", params, rankwise.get_world_size(), nbytes)


def allreduce_grads(params: Iterable[torch.Tensor], coalesce: bool = True, bucket_size_mb: int = -1) -> None:
    """Replace gradients by their mean over all ranks, in place.

    Collective over the session; a no-op alone, or without a session. As with `rankwise.sync_grads`, a gradient that is
    None on some ranks counts as zero there, sparse gradients stay sparse, and half precision is averaged in float32.

    Args:
        params: Parameters, in the same order on all ranks; those without requires_grad are ignored.
        coalesce: Send gradients together, in buckets; otherwise each alone.
        bucket_size_mb: The size of a bucket in MiB; one bucket for all if it is not above 0.

    Raises:
        MismatchError: The ranks' parameters differ in number, shape or type.
    """
    if not is_joined() or rankwise.get_world_size() == 1:
        return
    listed = list(params)
    if coalesce and bucket_size_mb <= 0:
        rankwise.sync_grads(listed)
        return
    trained = [param for param in listed if param.requires_grad]
    for bucket in _buckets(trained, bucket_size_mb * _MEBIBYTE if coalesce else 0):
        rankwise.sync_grads(bucket)


def _allreduce_coalesced(tensors: Sequence[torch.Tensor], world_size: int, bucket_size_mb: int = -1) -> None:
    """Replace tensors by their sum over all ranks divided by `world_size`, in place, many at once.

    Collective over the session.

    Raises:
        MismatchError, PayloadTypeError: As in `allreduce_params`.
    """
    _average("_allreduce_coalesced", tensors, world_size, _bucket_bytes(bucket_size_mb))


def _join(launcher: str, backend: str | None, **kwargs: Any) -> None:  # noqa: ANN401 - as for init_dist
    options = {name: value for name, value in kwargs.items() if value is not None}
    unknown = sorted(set(options) - {"timeout", "port", "rank", "world_size", "init_method"})
    if unknown:
        raise InvalidArgumentError(
            f"init_dist does not take {', '.join(unknown)}; it takes timeout, port, rank, world_size and init_method"
        )
    timeout = options.get("timeout", _TIMEOUT)
    environ = dict(os.environ)
    present = [known.name for known in rankwise.launchers() if known.present(environ)]
    name = _chosen(launcher, present)
    if "port" in options:
        if name in _LAUNCHERS["pytorch"][0]:
            raise InvalidArgumentError(f"port={options['port']}, but {name} sets the port: leave it out")
        environ["MASTER_PORT"] = str(options["port"])
    if len(alone := {"rank", "world_size"}.intersection(options)) == 1:  # the launcher's variable has the other
        environ |= {key.upper(): str(options.pop(key)) for key in alone}
    session = rankwise.init(
        # "auto" also completes the first launcher's environment with that of the others.
        launcher="auto" if name == present[0] else name,
        backend=_backend(backend),
        timeout=timeout.total_seconds() if isinstance(timeout, timedelta) else timeout,
        rank=options.get("rank"),
        world_size=options.get("world_size"),
        address=_address(options.get("init_method", "env://")),
        environ=environ,
    )
    _publish(session)


def _chosen(launcher: str, present: Sequence[str]) -> str:
    """Return the name of the launcher that `launcher` selects, among those that are present.

    Raises:
        LauncherEnvironmentError: None of those that `launcher` stands for is present.
    """
    if launcher == "auto":
        return present[0]
    names, remedy = _LAUNCHERS[launcher]
    found = [name for name in present if name in names]
    if not found:
        raise LauncherEnvironmentError(
            f"launcher={launcher!r}, but this process shows no sign of it, and was started by {present[0]!r}; "
            f"{remedy}, or pass launcher='auto'"
        )
    return found[0]


def _backend(backend: str | None) -> str | None:
    wanted = None if backend is None else str(backend).lower()
    if wanted == "nccl" and not torch.cuda.is_available():
        log.warning("backend='nccl', but this process has no CUDA device: it joins with gloo")
        return "gloo"
    return wanted


def _address(init_method: str) -> str | None:
    if init_method == "env://":
        return None
    if not init_method.startswith("tcp://"):
        raise InvalidArgumentError(f"init_method={init_method!r} is neither env:// nor tcp://host:port")
    return init_method.removeprefix("tcp://")


def _publish(session: Session) -> None:
    """Set the variables of this rank in the environment."""
    reading = launch_environment(session)
    variables: dict[str, object] = {"RANK": session.rank, "WORLD_SIZE": session.world_size}
    if reading.local_rank is not None:
        variables["LOCAL_RANK"] = reading.local_rank.value
    if reading.host is not None and reading.port is not None:
        variables |= {"MASTER_ADDR": reading.host.value, "MASTER_PORT": reading.port.value}
    elif session.world_size == 1:  # a world of one has no endpoint
        with socket.create_server((_LOOPBACK, 0)) as listener:
            variables |= {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": listener.getsockname()[1]}
    os.environ.update((name, str(value)) for name, value in variables.items())


def _bucket_bytes(bucket_size_mb: int) -> int:
    return (bucket_size_mb if bucket_size_mb > 0 else _BUCKET_MB) * _MEBIBYTE


def _average(name: str, given: Iterable[torch.Tensor], divisor: int, bucket_bytes: int) -> None:
    """Replace tensors by their sum over all ranks, divided, once all ranks agree on their number, shapes and types."""
    with collective(name, settings={"bucket_bytes": bucket_bytes, "divisor": divisor}) as members, torch.no_grad():
        tensors = list(given)
        for tensor in tensors:
            _check(tensor)
        members.values = {f"tensor {index}": describe(tensor) for index, tensor in enumerate(tensors)}
        members.verify()
        for bucket in _buckets(tensors, bucket_bytes):
            _average_bucket(members, bucket, divisor)


def _average_bucket(members: Members, bucket: list[torch.Tensor], divisor: int) -> None:
    """Replace tensors of one type by their sum over all ranks, divided; as one tensor."""
    bucket, scale = [tensor.data for tensor in bucket], members.size / divisor  # without the graphs that they are in
    if not (bucket[0].is_floating_point() or bucket[0].is_complex()):
        for tensor, mean in zip(bucket, members.all_reduce(bucket, "mean"), strict=True):
            overwrite(tensor, (mean * scale).round().to(tensor.dtype))
        return
    is_mean = divisor == members.size or bucket[0].dtype in _HALVES
    members.all_reduce_(bucket, "mean" if is_mean else "sum")
    if divisor != members.size:
        for tensor in bucket:
            overwrite(tensor, tensor * scale if is_mean else tensor / divisor)


def _check(tensor: torch.Tensor) -> None:
    """Check, before any data is sent, that a tensor can be replaced by a mean.

    Raises:
        PayloadTypeError: It is not a dense tensor whose type has a mean, or it is expanded.
    """
    if not isinstance(tensor, torch.Tensor):
        raise PayloadTypeError(f"parameters and buffers are tensors, got {describe(tensor)}")
    check_reducible(tensor, "mean")
    check_writable(tensor)


def _buckets(tensors: Iterable[torch.Tensor], nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Split tensors by type and device into buckets of at most `nbytes`, or of one tensor; the same on all ranks."""
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    free: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        size = tensor.numel() * tensor.element_size()  # sparse tensors have no nbytes
        if size > free.get(kind, 0) and kind in buckets:
            yield buckets.pop(kind)
        if kind not in buckets:
            buckets[kind], free[kind] = [], nbytes
        buckets[kind].append(tensor)
        free[kind] -= size
    yield from buckets.values()
