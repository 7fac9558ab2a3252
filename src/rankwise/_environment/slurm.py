"""Slurm: a task of a step is a rank; the shell of a job is not."""

from __future__ import annotations

import re
from typing import Final

from rankwise._environment.facts import (
    Environ,
    Fact,
    LaunchEnvironment,
    check_exported_world_size,
    read_int,
    read_port,
    read_text,
    require_int,
)
from rankwise._environment.hostlist import first
from rankwise.errors import LauncherEnvironmentError

# Step ids from here on are Slurm's own: interactive (...290), batch, extern, pending.
FIRST_RESERVED_STEP = 4294967290
# How many characters of a list an error message shows.
_SHOWN: Final = 200


class Slurm:
    """A task started by srun.

    Reads: SLURM_STEP_ID, SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE ("2(x3),1"),
    SLURM_NODEID, SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST, SLURM_JOB_ID, all set by srun for the step; and
    MASTER_ADDR, MASTER_PORT if the batch script exported them. SLURM_NTASKS, SLURM_NODELIST and SLURM_JOB_NODELIST
    are the job's, not the step's, and SLURM_NTASKS_PER_NODE can be stale: they are not read.
    """

    name: Final = "slurm"
    description: Final = "a task of srun"
    variables: Final = (
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
        *("SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"),
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
    )
    verified: Final = True

    def present(self, environ: Environ) -> bool:
        return "SLURM_PROCID" in environ and _is_srun_step(environ.get("SLURM_STEP_ID", ""))

    def read(self, environ: Environ) -> LaunchEnvironment:
        if not self.present(environ):
            raise LauncherEnvironmentError(
                "launcher='slurm' was asked for, but this process is not a task of a step: SLURM_STEP_ID is "
                f"{environ.get('SLURM_STEP_ID', 'not set')} and SLURM_PROCID is "
                f"{environ.get('SLURM_PROCID', 'not set')}; start it with srun"
            )
        world_size = require_int(environ, "SLURM_STEP_NUM_TASKS", because="SLURM_STEP_ID is: srun sets both")
        check_exported_world_size(environ, world_size)
        node_rank = read_int(environ, "SLURM_NODEID")
        job = read_text(environ, "SLURM_JOB_ID")
        return LaunchEnvironment(
            launcher=self.name,
            rank=require_int(environ, "SLURM_PROCID", because="SLURM_STEP_ID is: srun sets both"),
            world_size=world_size,
            local_rank=read_int(environ, "SLURM_LOCALID"),
            local_world_size=_tasks_on(environ, node_rank, world_size),
            node_rank=node_rank,
            num_nodes=read_int(environ, "SLURM_STEP_NUM_NODES"),
            host=read_text(environ, "MASTER_ADDR") or _first_host(environ),
            port=read_port(environ, "MASTER_PORT"),
            job=Fact(f"{job.value}.{environ['SLURM_STEP_ID']}", "SLURM_JOB_ID and SLURM_STEP_ID") if job else None,
        )


def _is_srun_step(step: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", step) is not None and int(step) < FIRST_RESERVED_STEP


def _first_host(environ: Environ) -> Fact[str] | None:
    nodes = read_text(environ, "SLURM_STEP_NODELIST")
    try:
        host = first(nodes.value) if nodes else None
    except LauncherEnvironmentError as error:
        raise LauncherEnvironmentError(f"SLURM_STEP_NODELIST cannot be read: {error}") from None
    return Fact(host, "SLURM_STEP_NODELIST") if host else None


def _tasks_on(environ: Environ, node_rank: Fact[int] | None, world_size: Fact[int]) -> Fact[int] | None:
    """Return the number of tasks on this node, from a list like "2(x3),1": 2 each on three nodes, 1 on the fourth."""
    text = read_text(environ, "SLURM_STEP_TASKS_PER_NODE")
    if text is None or node_rank is None:
        return None
    nodes = total = 0
    own: int | None = None
    for item in text.value.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?", item)
        if match is None:
            raise LauncherEnvironmentError(f"{text.source}={text.value[:_SHOWN]!r} is not a list like 2(x3),1")
        tasks, times = int(match[1]), int(match[2] or "1")
        nodes, total = nodes + times, total + tasks * times
        if own is None and node_rank.value < nodes:
            own = tasks
    if total != world_size.value or own is None:
        raise LauncherEnvironmentError(
            f"{text.source}={text.value[:_SHOWN]!r} has {total} tasks on {nodes} nodes, which does not fit "
            f"{world_size.source}={world_size.value} and {node_rank.source}={node_rank.value}"
        )
    return Fact(own, text.source)
