"""MPI's own launchers: Open MPI's mpirun, and the Hydra of MPICH and Intel MPI."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import (
    Environ,
    LaunchEnvironment,
    check_hint,
    one_node,
    read_int,
    read_port,
    read_text,
    require_int,
)


class OpenMpi:
    """Open MPI 4 and 5 (PRRTE).

    Reads: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE, set by its daemons; PMIX_NAMESPACE, which names
    the job; and MASTER_ADDR, MASTER_PORT if the user passed them (-x). Never "any OMPI_ variable": Slurm 24.11 sets
    OMPI_MCA_* in every process. OMPI_COMM_WORLD_NODE_RANK is not the node's index, and no variable is.
    """

    name: Final = "openmpi"

    def present(self, environ: Environ) -> bool:
        return "OMPI_COMM_WORLD_RANK" in environ

    def read(self, environ: Environ) -> LaunchEnvironment:
        return _read(
            environ,
            launcher=self.name,
            rank="OMPI_COMM_WORLD_RANK",
            world_size="OMPI_COMM_WORLD_SIZE",
            local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
            local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
            job="PMIX_NAMESPACE",
        )


class Hydra:
    """Hydra, the launcher of MPICH and, with a variable of its own (`mark`), of Intel MPI.

    Reads: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS, set by its proxy on each host; I_MPI_HYDRA_UUID,
    set by Intel's alone; and MASTER_ADDR, MASTER_PORT if the user passed them (-genv). PMI_RANK without MPI_LOCALRANKID
    is `srun --mpi=pmi2`, whose step is the better source. No variable is shared by all ranks and by no other job's.
    """

    def __init__(self, *, name: str, mark: str | None = None) -> None:
        self.name = name
        self.mark = mark

    def present(self, environ: Environ) -> bool:
        return all(name in environ for name in ("PMI_RANK", "MPI_LOCALRANKID", self.mark) if name is not None)

    def read(self, environ: Environ) -> LaunchEnvironment:
        return _read(
            environ,
            launcher=self.name,
            rank="PMI_RANK",
            world_size="PMI_SIZE",
            local_rank="MPI_LOCALRANKID",
            local_world_size="MPI_LOCALNRANKS",
            job=None,
        )


def _read(
    environ: Environ,
    *,
    launcher: str,
    rank: str,
    world_size: str,
    local_rank: str,
    local_world_size: str,
    job: str | None,
) -> LaunchEnvironment:
    """Read the variables of these names. No variable of MPI's says which node this is, unless there is only one."""
    own = require_int(environ, rank, because=f"launcher={launcher!r} reads it: start with mpirun or mpiexec")
    size = require_int(environ, world_size, because=f"{rank}={own.value} is: mpirun and mpiexec set both")
    check_hint(environ, size)
    local_size = read_int(environ, local_world_size)
    node_rank, num_nodes = one_node(local_size, size) or (None, None)
    return LaunchEnvironment(
        launcher=launcher,
        rank=own,
        world_size=size,
        local_rank=read_int(environ, local_rank),
        local_world_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        host=read_text(environ, "MASTER_ADDR"),
        port=read_port(environ, "MASTER_PORT"),
        job=None if job is None else read_text(environ, job),
    )
