"""The specification of a launch, checked before any process is started."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from rankwise._arguments import integer
from rankwise._dependencies import import_torch, require_torch
from rankwise._environment.facts import OVERRIDES
from rankwise._environment.nesting import run_variables
from rankwise._launch.forkserver.ipc import StartRequest, TargetKind
from rankwise._launch.grace_period import GRACE_SECONDS
from rankwise._launch.output import Output
from rankwise._rendezvous.nodes import Nodes
from rankwise.errors import InvalidArgumentError, shown

# More processes than this for each core are a typing error: each of them holds torch in memory.
_PER_CORE: Final = 16
_AT_LEAST: Final = 64

# In a world of one host, libraries listen on loopback too, as the store does, unless the user chose an interface.
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Those of a host, or of a person's session there, which say nothing on another host.
_OF_THIS_HOST: Final = frozenset({
    *("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "HOST", "TMPDIR", "TMP", "TEMP", "PWD", "OLDPWD"),
    *("_", "SHLVL", "TERM", "COLUMNS", "LINES", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "KRB5CCNAME"),
})  # fmt: skip
_OF_SESSIONS: Final = ("SSH_", "XDG_", "DBUS_", "TMUX", "GPG_")
# Variables by which a user describes the launcher's own rank: they do not describe its ranks.
_NOT_INHERITED: Final = frozenset(OVERRIDES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The ranks of one host.

    Attributes:
        nproc: The number of ranks.
        kind: The kind of their target.
        argv: The script, module or program and its arguments, the same for each rank; for a function, the caller's
            `sys.argv`.
        call: For a function: a pickled `FunctionCall`.
        max_restarts: How often all ranks are restarted after a failure.
        nodes: The hosts of the world; None if it is this one alone.
        ports: For a single host: the store listens on the first of these ports that is free; 0 for any.
        append_local_rank: Each rank gets --local_rank=N as its last argument.
        grace: The grace period in seconds after Ctrl-C, and for the exit of a rank whose target has failed.
        debug: The rank that a debugger stops at its first line, and after an exception; None for none.
        debugpy: The rank that waits for a client of debugpy; None for none.
        environ: The part of the environment that is the same for all ranks.
        role: The name of their role.
        virtual_local_rank: Each rank sees one GPU alone, and has the local rank 0.
        source: The source of a script that can be read once only, such as a pipe; None for a file.
        command: The command line of the launcher, which other hosts need too; () if it is not a command.
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
    debug: int | None = None
    debugpy: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    role: str = "default"
    virtual_local_rank: bool = False
    source: bytes | None = None
    command: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the target."""
        return "function" if self.kind is TargetKind.FUNCTION else self.argv[0]

    def request(self, variables: Mapping[str, str]) -> StartRequest:
        """Return the start request for a rank.

        Args:
            variables: The variables of the rank, as torchrun sets them.
        """
        appended = (f"--local_rank={variables['LOCAL_RANK']}",) if self.append_local_rank else ()
        environ = {**self.environ, **variables}
        if self.virtual_local_rank:
            environ |= _one_device(self.environ.get("CUDA_VISIBLE_DEVICES"), int(variables["LOCAL_RANK"]))
        return StartRequest(
            environ=environ | run_variables(environ),
            kind=self.kind,
            argv=(*self.argv, *appended),
            call=self.call,
            source=self.source,
            has_stdin=variables["RANK"] == "0",
            can_debug=True,
            debug=variables["RANK"] == str(self.debug),
            debugpy=variables["RANK"] == str(self.debugpy),
        )


def common_environ(nproc: int, *, one_host: bool) -> dict[str, str]:
    """Return the part of the environment that is the same for all ranks: the launcher's own, with defaults added."""
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    loopback = next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), None)
    for name in _INTERFACES:
        if one_host and loopback is not None:
            environ.setdefault(name, loopback)
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // nproc)))
    return environ


def own_environ() -> Mapping[str, str]:
    """Return the environment of this process."""
    return dict(os.environ)


def sent_environ() -> dict[str, str]:
    """Return the variables that the ranks of other hosts get: the launcher's own, but those of this host."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THIS_HOST and not name.startswith(_OF_SESSIONS)
    }


def parse_nproc(text: str) -> int:
    """Return the number of ranks for a value of a command line: a number, or "auto", "gpu" or "cpu" for one on each.

    Raises:
        InvalidArgumentError: It is neither a number nor one of these, or there is no GPU.
    """
    if text in {"auto", "gpu"}:
        require_torch(f"-n {text}")
        import_torch()  # a plain number does not wait for it
        import torch  # noqa: PLC0415

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
    """Check a number of ranks for this host, and return it.

    Raises:
        InvalidArgumentError: It is below 1, or above the number that a user could want on this host.
    """
    cores = os.cpu_count() or 1
    most = max(_AT_LEAST, _PER_CORE * cores)
    number = integer(nproc)
    if number is None or not 1 <= number <= most:
        raise InvalidArgumentError(
            f"nproc={shown(nproc)} is not a number of processes from 1 to {most} (this host has {cores} cores)"
        )
    return number


def check_placement(nproc: int, nodes: object, output: object) -> None:
    """Check the hosts of a launch, and the ranks whose output it shows.

    Raises:
        InvalidArgumentError: They have another type, or there is no such rank.
    """
    if nodes is not None and not isinstance(nodes, Nodes):
        raise InvalidArgumentError(f"nodes={shown(nodes)} is not a rankwise.launching.Nodes")
    if not isinstance(output, Output):
        raise InvalidArgumentError(f"output={shown(output)} is not a rankwise.launching.Output")
    output.check_ranks(nproc, is_world=nodes is None)


def _one_device(visible: str | None, local_rank: int) -> dict[str, str]:
    """Return the variables of a rank that sees one device alone, as torchrun sets them.

    Raises:
        InvalidArgumentError: There are fewer devices.
    """
    devices = None if visible is None else visible.split(",")
    if devices is not None and local_rank >= len(devices):
        raise InvalidArgumentError(
            f"virtual_local_rank needs a device for each rank, and CUDA_VISIBLE_DEVICES={visible!r} has none for local "
            f"rank {local_rank}"
        )
    return {
        "LOCAL_RANK": "0",
        "CUDA_VISIBLE_DEVICES": str(local_rank) if devices is None else devices[local_rank].strip(),
    }


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def hidden_variables(names: Iterable[str]) -> Iterator[None]:
    """Hide variables of this process from the programs that are started in this block."""
    hidden = {name: value for name in names if (value := os.environ.pop(name, None)) is not None}
    try:
        yield
    finally:
        os.environ.update(hidden)
