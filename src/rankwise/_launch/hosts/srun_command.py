"""How the watchdogs of a launch are started on the nodes of a Slurm allocation: by a step of srun on each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rankwise._environment.hostlist import expand
from rankwise._environment.schedulers import FIRST_RESERVED_STEP
from rankwise._launch.hosts.ssh_command import HostCommand
from rankwise._launch.interpreter import interpreter_command
from rankwise.errors import InvalidArgumentError, printable

# The step shares the cores and devices of the job with others of it, and binds its processes to none of them: there is
# one task for all ranks of a node. Slurm would hold back what is not a whole line.
_OPTIONS: Final = (
    *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--overlap", "--cpu-bind=none"),
    *("--export=ALL", "--unbuffered", "--quiet"),
)
_NODES: Final = "SLURM_JOB_NODELIST"
_STEP: Final = "SLURM_STEP_ID"


@dataclass(frozen=True, slots=True)
class SrunCommand(HostCommand):
    """How to start the watchdog of a node."""

    @property
    def program(self) -> str:
        """The program that starts it."""
        return "srun"

    @property
    def is_local(self) -> bool:
        """Never: it has to be a step, also on this node."""
        return False

    def argv(self) -> list[str]:
        """Return the command.

        Raises:
            LaunchError: There is no interpreter to start.
        """
        watchdog = [word.rstrip() for word in interpreter_command("other_hosts.watchdog")]
        return ["srun", *_OPTIONS, f"--nodelist={self.name}", *watchdog]

    def explain_loss(self, status: int | None, printed: str) -> str:
        """Return why a node is lost, with the reason that Slurm has printed."""
        found = re.search(r"\*\*\* ((?:JOB|STEP) .*(?:CANCELLED|NODE|LIMIT).*) \*\*\*", printed)
        if found is None:
            return HostCommand.explain_loss(self, status, printed)
        return f"host {self.name} is lost: Slurm has ended its step: {printable(found[1])}"

    def explain_stop(self, by: str) -> str:
        """Return why a launcher has stopped by a signal that this terminal has not sent."""
        return (
            f"its launcher was stopped by {by}, and not from this terminal: Slurm sends it when the job is "
            "cancelled, is preempted, or has reached its time limit"
        )


def srun_commands(environ: Mapping[str, str]) -> list[HostCommand]:
    """Return how to start the watchdogs of all nodes of the allocation that this process is in, in its order.

    Raises:
        InvalidArgumentError: It is in none, or is a task of a step.
        LauncherEnvironmentError: The list of nodes is malformed.
    """
    if not environ.get(_NODES):
        raise InvalidArgumentError(
            f"--srun uses the nodes of an allocation, and {_NODES} is not set: run the command in salloc or sbatch"
        )
    step = environ.get(_STEP, "")
    if re.fullmatch(r"[0-9]{1,18}", step) and int(step) < FIRST_RESERVED_STEP:
        raise InvalidArgumentError(
            f"--srun starts steps from the shell of a job, and this process is a task of one ({_STEP}={step}): run it "
            "without srun"
        )
    return [SrunCommand(name, ()) for name in dict.fromkeys(expand(environ[_NODES]))]
