"""Schedulers that start ranks themselves: Slurm, LSF, PBS, Flux, and Cray's ALPS and PALS."""

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
from rankwise._environment.table_launcher import TableLauncher
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


class Jsrun(TableLauncher):
    """jsrun of LSF, the launcher of Summit, Sierra and their relatives.

    Reads: JSM_NAMESPACE_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE, set by jsrun; LSB_JOBID and LSB_DJOB_RANKFILE, set by
    LSF for the job. The hosts stand in that file, the host of the batch script first, which has no rank. Spectrum MPI
    adds OMPI_COMM_WORLD_RANK and _SIZE: if they differ, they are of an mpirun that the task has started.
    """

    __slots__ = ()

    def present(self, environ: Environ) -> bool:
        both = (("OMPI_COMM_WORLD_RANK", self.rank), ("OMPI_COMM_WORLD_SIZE", self.world_size))
        return super().present(environ) and all(
            environ.get(inner, environ.get(own)) == environ.get(own) for inner, own in both
        )


JSRUN: Final = Jsrun(
    name="lsf",
    description="jsrun of LSF",
    start="jsrun sets both",
    rank="JSM_NAMESPACE_RANK",
    world_size="JSM_NAMESPACE_SIZE",
    local_rank="JSM_NAMESPACE_LOCAL_RANK",
    local_world_size="JSM_NAMESPACE_LOCAL_SIZE",
    job="LSB_JOBID",
    host_file="LSB_DJOB_RANKFILE",
    skipped=1,
    other_variables=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)

# The world sizes of MPI launchers, each with that of the launcher which may have set it around Flux.
_OF_MPI: Final = (
    ("OMPI_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"),
    *((name, "") for name in ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE", "MPI_NRANKS")),
)


class Flux(TableLauncher):
    """A task of Flux.

    Reads: FLUX_TASK_RANK, FLUX_JOB_SIZE, FLUX_TASK_LOCAL_ID, FLUX_JOB_NNODES and FLUX_JOB_ID, set by Flux's shell.
    No variable has a host: ranks on several nodes need MASTER_ADDR, which `flux hostlist --nth=0 local` prints in a
    task. The number of tasks on this node is known where there is one node.

    srun, jsrun or mpiexec may have started Flux, and its tasks have their variables too, in most versions. A task may
    also be an mpirun: OMPI_COMM_WORLD_SIZE shows Open MPI, but the one of jsrun, and MPI_LOCALRANKID shows Hydra if
    PMI_RANK and PMI_SIZE are not those that Flux sets.
    """

    __slots__ = ()

    def present(self, environ: Environ) -> bool:
        if not super().present(environ):
            return False
        if any(inner in environ and environ[inner] != environ.get(outer) for inner, outer in _OF_MPI):
            return False
        own = (("PMI_RANK", self.rank), ("PMI_SIZE", self.world_size))
        return "MPI_LOCALRANKID" not in environ or all(environ.get(pmi) == environ.get(flux) for pmi, flux in own)


FLUX: Final = Flux(
    name="flux",
    description="flux run, flux submit, flux batch",
    start="flux run sets both; in the script of flux batch or flux alloc, unset the FLUX_TASK_ variables to run alone",
    rank="FLUX_TASK_RANK",
    world_size="FLUX_JOB_SIZE",
    local_rank="FLUX_TASK_LOCAL_ID",
    num_nodes="FLUX_JOB_NNODES",
    job="FLUX_JOB_ID",
    other_variables=(
        *(name for names in _OF_MPI for name in names if name),
        *("MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE"),
    ),
)


class Pbsdsh(TableLauncher):
    """A task of pbsdsh: PBS without MPI.

    Reads: PBS_VNODENUM, PBS_TASKNUM, PBS_JOBID and PBS_NODEFILE, set by PBS; WORLD_SIZE, exported by the batch script;
    MASTER_ADDR and MASTER_PORT. PBS itself starts the batch script alone, which is task 1 and no rank, and most jobs
    use mpiexec, whose variables take precedence. So these count only with WORLD_SIZE, or if the program names this
    launcher. The first line of PBS_NODEFILE is the host of rank zero.
    """

    __slots__ = ()

    def present(self, environ: Environ) -> bool:
        batch_script = "1"
        return super().present(environ) and environ.get("PBS_TASKNUM", batch_script) != batch_script


PBSDSH: Final = Pbsdsh(
    name="pbs",
    description="pbsdsh in a PBS job that exports WORLD_SIZE",
    start="pbsdsh sets the index of the task, and the batch script has to export WORLD_SIZE",
    rank="PBS_VNODENUM",
    world_size="WORLD_SIZE",
    job="PBS_JOBID",
    host_file="PBS_NODEFILE",
    recognized_by=("PBS_VNODENUM", "WORLD_SIZE"),
    other_variables=("PBS_TASKNUM",),
)

# A task of submitit's local executor, on this host; its tasks on Slurm are those of srun.
# Reads: SUBMITIT_LOCAL_GLOBALID, SUBMITIT_LOCAL_NTASKS, SUBMITIT_LOCAL_LOCALID, SUBMITIT_LOCAL_NODEID,
# SUBMITIT_LOCAL_JOB_NUM_NODES, and SUBMITIT_LOCAL_JOB_ID, the id of the process that has started the tasks.
SUBMITIT: Final = TableLauncher(
    name="submitit",
    description="submitit's local executor",
    verified=True,
    start="submitit's LocalExecutor sets it for each task",
    rank="SUBMITIT_LOCAL_GLOBALID",
    world_size="SUBMITIT_LOCAL_NTASKS",
    local_rank="SUBMITIT_LOCAL_LOCALID",
    node_rank="SUBMITIT_LOCAL_NODEID",
    num_nodes="SUBMITIT_LOCAL_JOB_NUM_NODES",
    job="SUBMITIT_LOCAL_JOB_ID",
    recognized_by=("SUBMITIT_LOCAL_GLOBALID",),
)

# PALS, the mpiexec and aprun of HPE's Cray EX machines under PBS.
# Reads: PALS_RANKID, PALS_NRANKS, PALS_LOCAL_RANKID, PALS_LOCAL_SIZE, PALS_NODEID, and PMI_SIZE, PMI_LOCAL_RANK,
# PMI_LOCAL_SIZE for those that this version of PALS does not set; PALS_APID, the id of this application, of which a job
# may have several; and PBS_NODEFILE, set by PBS, whose first line is the host of rank zero.
PALS: Final = TableLauncher(
    name="pals",
    description="mpiexec of PALS (HPE Cray EX)",
    start="mpiexec of PALS sets PALS_RANKID, and PALS_NRANKS or PMI_SIZE",
    rank="PALS_RANKID",
    world_size="PALS_NRANKS",
    local_rank="PALS_LOCAL_RANKID",
    local_world_size="PALS_LOCAL_SIZE",
    node_rank="PALS_NODEID",
    job="PALS_APID",
    also=(("PALS_NRANKS", "PMI_SIZE"), ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"), ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")),
    host_file="PBS_NODEFILE",
)

# ALPS, the aprun of Cray's XE and XC machines.
# Reads: ALPS_APP_PE, the only one that aprun sets; and WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which the user has to
# pass (-e).
ALPS: Final = TableLauncher(
    name="alps",
    description="aprun of ALPS (Cray XE and XC)",
    start="aprun sets the rank alone: pass the others as in aprun -n 4 -e WORLD_SIZE=4 -e MASTER_ADDR=HOST",
    rank="ALPS_APP_PE",
    world_size="WORLD_SIZE",
    recognized_by=("ALPS_APP_PE",),
)
