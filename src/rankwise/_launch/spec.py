"""The specification of the ranks of one host, and the environment that they inherit."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from rankwise._environment.facts import OVERRIDES
from rankwise._environment.nesting import run_variables
from rankwise._launch.forkserver.ipc import StartRequest, Target
from rankwise._launch.options import Options
from rankwise._launch.output.line_prefix import HAS_PREFIX, shown_parts
from rankwise._launch.rank_stacks import HANG_DIR
from rankwise.errors import InvalidArgumentError

# Those of a host, or of a person's session there, which say nothing on another host.
_OF_THIS_HOST: Final = frozenset({
    *("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "HOST", "TMPDIR", "TMP", "TEMP", "PWD", "OLDPWD"),
    *("_", "SHLVL", "TERM", "COLUMNS", "LINES", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "KRB5CCNAME"),
})  # fmt: skip
_OF_SESSIONS: Final = ("SSH_", "XDG_", "DBUS_", "TMUX", "GPG_")
# Variables that describe the launcher's own rank, and not its ranks.
_NOT_INHERITED: Final = frozenset({*OVERRIDES, HAS_PREFIX})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The ranks of one host.

    Attributes:
        target: What each rank runs.
        options: The options of the launch.
        environ: The part of the environment that is the same for all ranks.
        command: The command line of the launcher, which other hosts need too; () if it is not a command.
        begun: When the launch began, on the monotonic clock.
    """

    target: Target
    options: Options
    environ: Mapping[str, str] = field(repr=False)
    command: tuple[str, ...] = ()
    begun: float = field(default_factory=time.monotonic)

    def request(self, variables: Mapping[str, str]) -> StartRequest:
        """Return the start request for a rank.

        Args:
            variables: The variables of the rank, as torchrun sets them.
        """
        options, environ = self.options, {**self.environ, **variables}
        local_rank, rank = variables["LOCAL_RANK"], variables["RANK"]
        if options.virtual_local_rank:
            environ |= _one_device(self.environ.get("CUDA_VISIBLE_DEVICES"), int(local_rank))
        appended = (f"--local_rank={local_rank}",) if options.append_local_rank else ()
        return StartRequest(
            environ=environ | run_variables(environ),
            target=replace(self.target, argv=(*self.target.argv, *appended)),
            has_stdin=rank == "0",
            can_debug=True,
            debug=rank == str(options.debug),
            debugpy=rank == str(options.debugpy),
        )


def rank_environ(options: Options) -> dict[str, str]:
    """Return the part of the environment that is the same for all ranks of a launch."""
    environ = common_environ(options.nproc, one_host=options.nodes is None) | dict(options.environ)
    if options.hang_dir:
        environ[HANG_DIR] = str(Path(options.hang_dir).absolute())  # a rank may have another working directory
    if shown_parts(options.output.prefix, options.nproc if options.nodes is None else 2):
        environ[HAS_PREFIX] = "1"
    return environ


def common_environ(nproc: int, *, one_host: bool) -> dict[str, str]:
    """Return the part of the environment that is the same for all ranks: the launcher's own, with defaults added."""
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    loopback = next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), None)
    if one_host and loopback is not None:  # libraries listen there too, as the store does, unless the user chose
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    environ.setdefault("OMP_NUM_THREADS", threads_of_each(nproc))
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


def threads_of_each(num_ranks: int) -> str:
    """Return OMP_NUM_THREADS for so many ranks on this host."""
    return str(max(1, _cores() // num_ranks))


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


@contextlib.contextmanager
def without_warnings_of_torch() -> Iterator[None]:
    """Let torch's C++ code, while it is imported, read that it shall not warn, unless the user has set something.

    It shows the C++ stack of each connection that is lost, as when another launcher has ended, which the launcher says
    in a line.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        del os.environ[name]
