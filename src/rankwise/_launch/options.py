"""The options of a launch, which those of scripts and of functions have in common."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rankwise._arguments import as_bool, as_integer, as_seconds, as_text, integer
from rankwise._dependencies import import_torch, require_torch
from rankwise._environment.facts import MAX_PORT
from rankwise._launch.grace_period import GRACE_SECONDS
from rankwise._launch.output.settings import Output
from rankwise._launch.preload import Preload, check_preload
from rankwise._rendezvous.nodes import Nodes
from rankwise.errors import InvalidArgumentError, MissingDependencyError, shown

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
_LONGEST_GRACE: Final = 86_400.0
# More processes than this for each core are a typing error: each of them holds torch in memory.
_PER_CORE: Final = 16
_AT_LEAST: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a launch in ranks of this host; `ScriptLaunch` describes them.

    Raises:
        InvalidArgumentError: One of them cannot be used.
    """

    nproc: int
    nodes: Nodes | None = None
    output: Output = field(default_factory=Output)
    max_restarts: int = 0
    grace: float = GRACE_SECONDS
    preload: Preload = True
    ports: Sequence[int] = (0,)
    debug: int | None = None
    debugpy: int | None = None
    append_local_rank: bool = False
    role: str = "default"
    virtual_local_rank: bool = False
    signals: Sequence[int] = STOP_SIGNALS
    hang_dir: str = ""
    timeout: float | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_nproc(self.nproc)
        as_text(self.role, "role")
        as_text(self.hang_dir, "hang_dir")
        as_bool(self.virtual_local_rank, "virtual_local_rank")
        if as_integer(self.max_restarts, "max_restarts") < 0:
            raise InvalidArgumentError(f"max_restarts={self.max_restarts} is below 0")
        if self.timeout is not None:
            as_seconds(self.timeout, "timeout")
        if not isinstance(self.environ, Mapping):
            raise InvalidArgumentError(f"environ={shown(self.environ)} is not a dict of variables")
        for name, value in self.environ.items():
            as_text(name, "a name in environ")
            as_text(value, f"environ[{name!r}]")
        if self.grace != 0:
            as_seconds(self.grace, "grace", most=_LONGEST_GRACE)
        if not self.ports or not all(0 <= as_integer(port, "a port") <= MAX_PORT for port in self.ports):
            raise InvalidArgumentError(f"ports={shown(self.ports)} is not a sequence of ports, from 0 to {MAX_PORT}")
        self._check_debug()
        check_preload(self.preload)
        if self.nodes is not None and not isinstance(self.nodes, Nodes):
            raise InvalidArgumentError(f"nodes={shown(self.nodes)} is not a rankwise.launching.Nodes")
        if not isinstance(self.output, Output):
            raise InvalidArgumentError(f"output={shown(self.output)} is not a rankwise.launching.Output")
        self.output.check_ranks(self.nproc, is_world=self.nodes is None)

    def _check_debug(self) -> None:
        """Check the ranks that are started in a debugger.

        Raises:
            MissingDependencyError: There is no debugpy.
        """
        for name, rank in (("debug", self.debug), ("debugpy", self.debugpy)):
            if rank is not None and (as_integer(rank, name) < 0 or (self.nodes is None and rank >= self.nproc)):
                raise InvalidArgumentError(
                    f"{name}={rank} is no rank: of {self.nproc} ranks the last is {self.nproc - 1}"
                )
        if self.debug is not None and self.debug == self.debugpy:
            raise InvalidArgumentError(f"debug={self.debug} and debugpy={self.debugpy} name the same rank")
        if self.debugpy is not None and importlib.util.find_spec("debugpy") is None:
            raise MissingDependencyError("debugpy is not installed, which a rank listens with: pip install debugpy")


def num_accelerators() -> int:
    """Return the number of accelerators of this host that torch sees; it opens none of them."""
    require_torch("nproc='auto'")
    import_torch()
    import torch  # noqa: PLC0415 - other numbers of ranks do not need it

    return torch.accelerator.device_count()


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
