"""MPI's own launchers: Open MPI's mpirun, and the Hydra of MPICH and Intel MPI."""

from __future__ import annotations

from typing import Final

from rankwise.environment.reading import (
    Environ,
    Reading,
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
    markers: Final = "OMPI_COMM_WORLD_RANK"

    def present(self, environ: Environ) -> bool:
        return "OMPI_COMM_WORLD_RANK" in environ

    def read(self, environ: Environ) -> Reading:
        because = "OMPI_COMM_WORLD_RANK is: mpirun sets both"
        rank = require_int(environ, "OMPI_COMM_WORLD_RANK", because="launcher='openmpi' reads it: start with mpirun")
        world_size = require_int(environ, "OMPI_COMM_WORLD_SIZE", because=because)
        check_hint(environ, world_size)
        local_world_size = read_int(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
        node_rank, num_nodes = one_node(local_world_size, world_size) or (None, None)
        return Reading(
            launcher=self.name,
            rank=rank,
            world_size=world_size,
            local_rank=read_int(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            host=read_text(environ, "MASTER_ADDR"),
            port=read_port(environ, "MASTER_PORT"),
            job=read_text(environ, "PMIX_NAMESPACE"),
        )


class Pmi:
    """Hydra, the launcher of MPICH and Intel MPI.

    Reads: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS, set by its proxy on each host; and MASTER_ADDR,
    MASTER_PORT if the user passed them (-genv). PMI_RANK without MPI_LOCALRANKID is `srun --mpi=pmi2`, whose step is
    the better source. No variable is shared by all ranks and by no other job's.
    """

    name: Final = "pmi"
    markers: Final = "PMI_RANK and MPI_LOCALRANKID"

    def present(self, environ: Environ) -> bool:
        return "PMI_RANK" in environ and "MPI_LOCALRANKID" in environ

    def read(self, environ: Environ) -> Reading:
        rank = require_int(environ, "PMI_RANK", because="launcher='pmi' reads it: start with mpiexec")
        world_size = require_int(environ, "PMI_SIZE", because="PMI_RANK is: mpiexec sets both")
        check_hint(environ, world_size)
        local_world_size = read_int(environ, "MPI_LOCALNRANKS")
        node_rank, num_nodes = one_node(local_world_size, world_size) or (None, None)
        return Reading(
            launcher=self.name,
            rank=rank,
            world_size=world_size,
            local_rank=read_int(environ, "MPI_LOCALRANKID"),
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            host=read_text(environ, "MASTER_ADDR"),
            port=read_port(environ, "MASTER_PORT"),
        )
