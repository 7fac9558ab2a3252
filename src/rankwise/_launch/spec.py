"""What to start: checked before anything is started."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rankwise._arguments import integer
from rankwise._dependencies import require_torch
from rankwise._environment.facts import OVERRIDES
from rankwise._environment.nesting import run_variables
from rankwise._launch.forkserver.ipc import StartRequest, TargetKind
from rankwise._rendezvous.nodes import Nodes
from rankwise.errors import InvalidArgumentError, shown

# More processes than this for each core is a typing error: every one of them holds torch.
_PER_CORE: Final = 16
_AT_LEAST: Final = 64

# How long a rank may take to end after Ctrl-C, as to save a checkpoint; and by itself, after what it runs has failed.
GRACE_SECONDS: Final = 10.0

# What libraries listen on besides the store stays on this host too, unless the user chose an interface.
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# What the user said of the launcher's place is not true of its ranks.
_NOT_THEIRS: Final = frozenset(OVERRIDES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The ranks of one host.

    Attributes:
        nproc: How many.
        kind: The kind of target that they run.
        argv: The script, module or program and its arguments, the same for every rank; the caller's, for a function.
        call: What a function is called with, and where: a `FunctionCall`, pickled.
        max_restarts: How often all ranks are started again after one failed.
        nodes: The hosts of the world; None if it is this one alone.
        ports: Where the store of one host listens: the first of these that is free; 0 for any.
        append_local_rank: Every rank's last argument is --local_rank=N.
        grace: How many seconds a rank may take to end after Ctrl-C, or after it has failed.
        environ: What all ranks' environments have in common.
    """

    nproc: int
    kind: TargetKind
    argv: tuple[str, ...] = ()
    call: bytes = b""
    max_restarts: int = 0
    nodes: Nodes | None = None
    ports: tuple[int, ...] = (0,)
    append_local_rank: bool = False
    grace: float = GRACE_SECONDS
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What is started, in a word."""
        return "function" if self.kind is TargetKind.FUNCTION else self.argv[0]

    def request(self, place: Mapping[str, str]) -> StartRequest:
        """Return what to ask of a rank, given the variables that tell it its place."""
        told = (f"--local_rank={place['LOCAL_RANK']}",) if self.append_local_rank else ()
        environ = {**self.environ, **place}
        return StartRequest(
            environ=environ | run_variables(environ),
            kind=self.kind,
            argv=(*self.argv, *told),
            call=self.call,
        )


def common_environ(nproc: int, *, one_host: bool) -> dict[str, str]:
    """Return what the environments of all ranks have in common: the launcher's own, completed."""
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_THEIRS}
    loopback = next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), None)
    for name in _INTERFACES:
        if one_host and loopback is not None:
            environ.setdefault(name, loopback)
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // nproc)))
    return environ


def number_of_processes(text: str) -> int:
    """Return how many processes a command line asks for on this host: "4"; "auto", "gpu" or "cpu" for one on each.

    Raises:
        InvalidArgumentError: It is neither a number nor one of these, or there is no GPU.
    """
    if text in {"auto", "gpu"}:
        require_torch(f"-n {text}")
        import torch  # noqa: PLC0415 - numbers do not wait for it

        found = torch.accelerator.device_count()
        if found:
            return found
        if text == "gpu":
            raise InvalidArgumentError(
                f"torch {torch.__version__} sees no GPU on this host: is CUDA_VISIBLE_DEVICES empty, or this "
                "torch built for CPUs? auto starts a rank for each core instead"
            )
    if text in {"auto", "cpu"}:
        return os.cpu_count() or 1
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"{text!r} is not a number, nor one of auto, cpu, gpu") from None


def check_nproc(nproc: int) -> int:
    """Return a number of processes to start here, checked.

    Raises:
        InvalidArgumentError: It is below 1, or beyond what this host could be meant to run.
    """
    cores = os.cpu_count() or 1
    most = max(_AT_LEAST, _PER_CORE * cores)
    number = integer(nproc)
    if number is None or not 1 <= number <= most:
        raise InvalidArgumentError(
            f"nproc={shown(nproc)} is not a number of processes from 1 to {most} (this host has {cores} cores)"
        )
    return number


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
