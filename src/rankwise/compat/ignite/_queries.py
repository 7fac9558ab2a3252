"""Ignite's getters. They never communicate, and return rank 0 of 1 in a single process, as Ignite's do."""

from __future__ import annotations

from typing import Final

import torch

import rankwise
from rankwise import Session
from rankwise.compat.ignite import _xla_training
from rankwise.compat.ignite._identity import topology_number
from rankwise.compat.ignite._logging import log_on_rank_zero
from rankwise.compat.ignite._model_backends import NATIVE, SERIAL, XLA, XLA_TPU, has_xla_support
from rankwise.errors import NotJoinedError
from rankwise.extend._dropins import current_session, launch_environment
from rankwise.extend.launchers import Fact

_NUMBERS: Final = {
    "local rank": "local_rank",
    "num processes per_node": "local_world_size",
    "num nodes": "num_nodes",
    "node rank": "node_rank",
}


def get_world_size() -> int:
    """Return the number of ranks; 1 alone.

    Local.

    Example:
        >>> get_world_size()
        1
    """
    session = current_session()
    return topology_number("world_size") if session is None else session.world_size


def get_rank() -> int:
    """Return this process's rank; 0 alone.

    Local.

    Example:
        >>> get_rank()
        0
    """
    session = current_session()
    return topology_number("rank") if session is None else session.rank


def get_local_rank() -> int:
    """Return this process's rank on its node; 0 alone.

    Local.

    Raises:
        NotJoinedError: Other code opened the process group, and no variable provides it; call `sync()` on all ranks.

    Example:
        >>> get_local_rank()
        0
    """
    return topology_number("local_rank")


def get_nproc_per_node() -> int:
    """Return the number of ranks on this node, which may differ between nodes; 1 alone.

    Local.

    Raises:
        NotJoinedError: Other code opened the process group, and no variable provides it; call `sync()` on all ranks.

    Example:
        >>> get_nproc_per_node()
        1
    """
    return topology_number("local_world_size")


def get_nnodes() -> int:
    """Return the number of nodes; 1 alone.

    Local.

    Raises:
        NotJoinedError: Other code opened the process group, and no variable provides it; call `sync()` on all ranks.

    Example:
        >>> get_nnodes()
        1
    """
    return topology_number("num_nodes")


def get_node_rank() -> int:
    """Return the rank of this node; 0 alone.

    Local.

    Raises:
        NotJoinedError: Other code opened the process group, and no variable provides it; call `sync()` on all ranks.

    Example:
        >>> get_node_rank()
        0
    """
    return topology_number("node_rank")


def device() -> torch.device:
    """Return this rank's device: the CPU with gloo and mpi, its GPU with nccl, an XLA device with xla-tpu.

    Alone, it is an XLA device where torch_xla is installed, as in Ignite, and otherwise this host's GPU or the CPU.

    Local.

    Example:
        >>> device().type in {"cpu", "cuda", "mps", "xla"}
        True
    """
    session = current_session()
    if session is not None:
        return session.device
    if has_xla_support:
        return _xla_training.own_device()
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def backend() -> str | None:
    """Return the backend for tensors on this rank's device: "nccl", "gloo", "mpi" or "xla-tpu"; None alone.

    Local. Alone, it is "xla-tpu" where torch_xla is installed, as in Ignite.

    Example:
        >>> backend() is None
        True
    """
    if model_name() == XLA:
        return XLA_TPU
    session = current_session()
    return None if session is None else _backend(session)


def model_name() -> str:
    """Return the name of the computation model: "native-dist", "xla-dist" for XLA devices, "serial" alone.

    Local. Alone, it is "xla-dist" where torch_xla is installed, as in Ignite.

    Example:
        >>> model_name()
        'serial'
    """
    session = current_session()
    if session is None:
        return XLA if has_xla_support else SERIAL
    return XLA if session.backend == "xla" else NATIVE


def show_config() -> None:
    """Log rank zero's topology with its sources, its device and its backend.

    Local. It uses the logger "ignite.distributed.utils" at level INFO, and writes to stderr unless the program has
    configured that logger.

    Example:
        >>> show_config()
    """
    if get_rank() != 0:
        return
    lines = [
        ("distributed configuration", model_name()),
        ("backend", str(backend())),
        ("device", str(device())),
        ("hostname", rankwise.hostname()),
        ("world size", str(get_world_size())),
        ("rank", str(get_rank())),
        *((label, _number(name)) for label, name in _NUMBERS.items()),
        ("torch", torch.__version__),
    ]
    session = current_session()
    if session is not None:
        environment = launch_environment(session)
        sources = (f"{name} from {_source(name, fact)}" for name, fact in environment.facts().items())
        lines.append(("launcher", f"{environment.launcher} ({', '.join(sources)})"))
    for label, text in lines:
        log_on_rank_zero("utils", "%s: %s", label, text)


def _backend(session: Session) -> str | None:
    """Return the backend for a session's device: "cpu:gloo,cuda:nccl" -> "nccl" on a GPU."""
    parts = [part.rpartition(":") for part in (session.backend or "").lower().split(",")]
    by_device_type = {device_type: name for device_type, _, name in parts}
    return by_device_type.get(session.device.type) or by_device_type.get("") or parts[0][2] or None


def _source(name: str, fact: Fact[int] | Fact[str] | None) -> str:
    if fact is not None:
        return fact.source
    return "not set" if name in {"host", "port", "job"} else "not known before init()"


def _number(name: str) -> str:
    try:
        return str(topology_number(name))
    except NotJoinedError:
        return "not known before sync()"
