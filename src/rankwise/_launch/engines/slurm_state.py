"""The state of a job of Slurm, and the outcomes of its ranks when it has ended."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankwise._environment.hostlist import expand
from rankwise._launch.engines import slurm_files
from rankwise._launch.engines.interface import RankOutcome
from rankwise.errors import InvalidArgumentError, LaunchError

# Between two looks for results, and between two questions to Slurm's controller: more as time passes.
_LOOK_SECONDS: Final = (0.05, 2.0)
_ASK_SECONDS: Final = (1.0, 10.0)
# Waits grow to this part of the time since the start.
_GROWTH: Final = 0.02
# How long a controller that does not answer is asked again; it may be restarting.
_SILENT_SECONDS: Final = 300.0
# How long the files of a job that has ended may take to appear on this host.
_FILES_SECONDS: Final = 10.0
_COMMAND_SECONDS: Final = 60.0
# The states of a job that has not ended, or that will run again.
_GOES_ON: Final = frozenset({
    *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "PREEMPTED"),
})  # fmt: skip
_NODE_IS_GONE: Final = re.compile("down|drained|fail|unk|reboot|power|not_resp", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The state of a job.

    Attributes:
        state: Slurm's name of it, such as RUNNING; "" if Slurm has forgotten the job, which has ended then.
        nodes: The names of its nodes, in the order of ranks.
        reason: Why it is in that state, as Slurm says; "" or "None" for nothing.
    """

    state: str = ""
    nodes: tuple[str, ...] = ()
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        """The job has ended, and will not run again."""
        return self.state not in _GOES_ON


def checked(job_id: str) -> str:
    """Return the id of a job.

    Raises:
        InvalidArgumentError: It is none.
    """
    if not re.fullmatch(r"\d{1,18}(_\d{1,18})?", str(job_id)):
        raise InvalidArgumentError(f"{job_id!r} is not the id of a job of Slurm, such as 123 or 123_4")
    return str(job_id)


def run(command: Sequence[str]) -> str:
    """Run a command of Slurm, and return its output.

    Raises:
        LaunchError: There is no such command, or it has failed.
    """
    try:
        ended = subprocess.run(  # noqa: S603 - a list of arguments
            command, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS
        )
    except FileNotFoundError:
        raise LaunchError(f"there is no {command[0]} in PATH: Slurm's commands are needed on this host") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} has not ended in {_COMMAND_SECONDS:.0f} s: is slurmctld running?") from None
    if ended.returncode:
        raise LaunchError(f"{' '.join(command)} failed: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout


def state_of(job_id: str) -> JobState:
    """Ask Slurm for the state of a job.

    Raises:
        LaunchError: Slurm does not answer.
    """
    try:
        out = run(["squeue", "-h", "-t", "all", "-j", checked(job_id), "-o", "%T|%N|%r"])
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return JobState()
        raise
    line = out.strip().splitlines()[0] if out.strip() else ""
    state, nodes, reason = [*line.split("|"), "", ""][:3]
    return JobState(state=state, nodes=tuple(expand(nodes)) if nodes else (), reason=reason)


def wait(folder: Path, job_id: str) -> list[RankOutcome]:
    """Wait until all ranks of a job have returned, or the job has ended, and return the outcomes of its ranks.

    Raises:
        LaunchError: The folder has no such job, or Slurm does not answer.
    """
    size = slurm_files.read_size(folder, checked(job_id))
    world_size, token = size["nproc"] * size["nnodes"], size["token"]
    start = asked = answered = time.monotonic()
    known = JobState(state="PENDING")
    while True:
        now = time.monotonic()
        has_all = slurm_files.number_of_outcomes(folder, token) >= world_size
        outcomes = slurm_files.read_outcomes(folder, token) if has_all else {}
        if has_all and not any(one.failure for one in outcomes.values()):
            return [outcomes[rank] for rank in sorted(outcomes)]
        if has_all or now - asked >= _pause(_ASK_SECONDS, now - start):
            try:
                known, answered = _merged(known, state_of(job_id)), now
            except LaunchError:
                if now - answered > _SILENT_SECONDS:
                    raise
            asked = now
            if known.has_ended:
                return _outcomes_of_ended(folder, token, known, nproc=size["nproc"], world_size=world_size)
        time.sleep(max(_pause(_LOOK_SECONDS, now - start), _LOOK_SECONDS[0] if not has_all else _ASK_SECONDS[0] / 2))


def _merged(before: JobState, now: JobState) -> JobState:
    """Return the state with the nodes of before, if Slurm does not name them any more."""
    return now if now.nodes else JobState(state=now.state, nodes=before.nodes, reason=now.reason)


def _pause(bounds: tuple[float, float], elapsed: float) -> float:
    return min(bounds[1], max(bounds[0], elapsed * _GROWTH))


def _outcomes_of_ended(folder: Path, token: str, state: JobState, *, nproc: int, world_size: int) -> list[RankOutcome]:
    """Return the outcomes that ranks have recorded, and for the others what Slurm knows."""
    deadline = time.monotonic() + _FILES_SECONDS
    while (outcomes := slurm_files.read_outcomes(folder, token)).keys() != set(range(world_size)):
        if state.state != "COMPLETED" or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS[0])
    gone = _gone_nodes(state.nodes)
    for rank in range(world_size):
        node = state.nodes[rank // nproc] if rank // nproc < len(state.nodes) else "?"
        known = outcomes.get(rank)
        if node in gone and (known is None or (known.failure is not None and known.failure.stopped)):
            why = f"node {node} is {gone[node]}; Slurm ended the job with {state.state}"
            outcomes[rank] = RankOutcome.lost(rank, host=node, why=why, time_ns=time.time_ns())
        elif known is None:
            outcomes[rank] = RankOutcome.lost(
                rank, host=node, why=_why(state), stopped=bool(gone), time_ns=time.time_ns()
            )
    return [outcomes[rank] for rank in sorted(outcomes)]


def _why(state: JobState) -> str:
    reason = f" ({state.reason})" if state.reason not in {"", "None"} else ""
    return f"Slurm ended the job with {state.state or 'a state that it has forgotten'}{reason}"


def _gone_nodes(nodes: Sequence[str]) -> dict[str, str]:
    """Return those of the nodes that cannot run jobs, with their states."""
    if not nodes:
        return {}
    try:
        out = run(["sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N %T"])
    except LaunchError:
        return {}
    lines = [line.split() for line in out.splitlines()]
    return {line[0]: line[1] for line in lines if len(line) > 1 and _NODE_IS_GONE.search(line[1])}
