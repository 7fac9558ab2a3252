"""Engines: what runs the ranks of a launch on hosts that it has chosen itself, such as Slurm or Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from rankwise._launch.forkserver.ipc import TargetKind
from rankwise.errors import RankFailure

# The name of the setup function of ranks without a terminal, for `FunctionCall`.
NO_TERMINAL: Final = "rankwise._launch.engines.no_terminal:refuse_input"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """A job for an engine: the same target in each rank.

    It can be pickled, for the processes where the ranks will run.

    Attributes:
        nproc: The number of ranks on each node.
        nnodes: The number of nodes.
        name: The name of the target.
        kind: The kind of target.
        argv: The script, module or program and its arguments; for a function, the caller's `sys.argv`.
        call: For a function: a pickled `FunctionCall`.
    """

    nproc: int
    nnodes: int
    name: str
    kind: TargetKind
    argv: tuple[str, ...] = ()
    call: bytes = b""

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.nproc * self.nnodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """How a rank of a job has ended.

    Attributes:
        rank: The global rank.
        value: The return value of the function, pickled; b"" if it has not returned.
        failure: How it has failed; None if it has not.
        error: Its exception, pickled; b"" if it cannot be pickled, or nothing was raised.
        consequence: Its exception is a consequence of another rank's end.
        time_ns: When it ended, in nanoseconds since the epoch.
    """

    rank: int
    value: bytes = b""
    failure: RankFailure | None = None
    error: bytes = b""
    consequence: bool = False
    time_ns: int = 0

    @classmethod
    def lost(cls, rank: int, *, host: str, why: str, stopped: bool = False, time_ns: int = 0) -> RankOutcome:
        """Return the outcome of a rank whose end nobody has seen.

        Args:
            rank: The global rank.
            host: The node it ran on; "?" if it has none.
            why: The reason, as a clause: "node gpu-07 is down".
            stopped: The engine has stopped it, because another rank had failed.
            time_ns: When this was noticed, in nanoseconds since the epoch.
        """
        failure = RankFailure(rank=rank, host=host, exitcode=1, lost=why)
        return cls(rank=rank, failure=failure, consequence=stopped, time_ns=time_ns)

    def on(self, host: str) -> RankOutcome:
        """Return the same outcome with the engine's name of the node."""
        return self if self.failure is None else replace(self, failure=replace(self.failure, host=host))


class Engine(Protocol):
    """What runs the ranks of jobs elsewhere."""

    @property
    def name(self) -> str:
        """Its name, for `on=`."""

    def submit(self, jobs: Sequence[RankJob]) -> list[str]:
        """Submit jobs, and return their ids, in the same order. Does not wait until they run.

        Raises:
            InvalidArgumentError: The engine cannot run such a job.
            MissingDependencyError: A package that the engine needs is not installed.
            LaunchError: The jobs were refused.
        """

    def wait(self, job_id: str) -> Sequence[RankOutcome]:
        """Wait until a job has ended, and return the outcomes of all of its ranks; after a failure, stop the others.

        Raises:
            LaunchError: There is no such job, or the engine has ended.
        """

    def cancel(self, job_id: str) -> None:
        """End a job, and all of its processes; nothing happens if it has ended.

        Raises:
            LaunchError: The engine has refused.
        """

    def logs(self, job_id: str) -> Mapping[int, Sequence[Path]]:
        """Return the files with the output of ranks, by rank: standard output, then standard error.

        Raises:
            LaunchError: There are none.
        """
