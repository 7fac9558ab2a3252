"""The launchers of MPI libraries."""

from __future__ import annotations

from typing import Final

from rankwise._environment.table_launcher import TableLauncher

# Open MPI 4 and 5 (PRRTE).
# Reads: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE, set by its daemons; PMIX_NAMESPACE, which names the
# job; and MASTER_ADDR, MASTER_PORT if the user passed them (-x). Never "any OMPI_ variable": Slurm 24.11 sets
# OMPI_MCA_* in every process. OMPI_COMM_WORLD_NODE_RANK is not the node's index, and no variable is.
OPEN_MPI: Final = TableLauncher(
    name="openmpi",
    description="mpirun of Open MPI 4 and 5",
    verified=True,
    start="start with mpirun, which sets both",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    job="PMIX_NAMESPACE",
    recognized_by=("OMPI_COMM_WORLD_RANK",),
)


def _hydra(name: str, description: str, *markers: str) -> TableLauncher:
    """Return Hydra, the mpirun and mpiexec of MPICH and, with a variable of its own, of Intel MPI.

    Reads: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS, set by its proxy on each host; I_MPI_HYDRA_UUID,
    set by Intel's alone; and MASTER_ADDR, MASTER_PORT if the user passed them (-genv). PMI_RANK without MPI_LOCALRANKID
    is `srun --mpi=pmi2`, whose step is the better source. No variable is shared by all ranks and by no other job's.
    """
    return TableLauncher(
        name=name,
        description=description,
        verified=True,
        start="start with mpirun or mpiexec, which set both",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        recognized_by=("PMI_RANK", "MPI_LOCALRANKID", *markers),
    )


INTEL_MPI: Final = _hydra("intelmpi", "mpirun of Intel MPI", "I_MPI_HYDRA_UUID")
MPICH: Final = _hydra("mpich", "mpiexec of MPICH (Hydra)")


def _mvapich(version: int, prefix: str) -> TableLauncher:
    """Return MVAPICH 2 or 3, of which each has its own prefix.

    Reads: MV2_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE, or those with MVP_COMM_WORLD_, set by mpirun_rsh.
    Its mpiexec is Hydra, whose variables take precedence.
    """
    return TableLauncher(
        name=f"mvapich{version}",
        description=f"mpirun_rsh of MVAPICH {version}",
        start="mpirun_rsh and mpiexec set both",
        rank=f"{prefix}_COMM_WORLD_RANK",
        world_size=f"{prefix}_COMM_WORLD_SIZE",
        local_rank=f"{prefix}_COMM_WORLD_LOCAL_RANK",
        local_world_size=f"{prefix}_COMM_WORLD_LOCAL_SIZE",
    )


MVAPICH2: Final = _mvapich(2, "MV2")
MVAPICH3: Final = _mvapich(3, "MVP")

# Platform MPI, formerly HP-MPI.
# Reads: MPI_RANKID, MPI_NRANKS, and MPI_LOCALRANKID, MPI_LOCALNRANKS where it sets them.
PLATFORM_MPI: Final = TableLauncher(
    name="platformmpi",
    description="mpirun of Platform MPI",
    start="mpirun of Platform MPI sets both",
    rank="MPI_RANKID",
    world_size="MPI_NRANKS",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
)

# HPE MPT, formerly SGI MPT.
# Reads: MPT_LRANK, the rank on this node; and PMI_RANK, PMI_SIZE, which it needs too. Under srun, Slurm's variables
# take precedence.
MPT: Final = TableLauncher(
    name="mpt",
    description="mpiexec_mpt of HPE MPT",
    start="mpiexec_mpt sets MPT_LRANK, and these only through PMI; set RANK and WORLD_SIZE for each process",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPT_LRANK",
    recognized_by=("MPT_LRANK",),
)

# A launcher that sets the variables of PMI, and none of its own: Hydra up to MPICH 3.2, and mpiexec.gforker.
# Reads: PMI_RANK and PMI_SIZE; and MASTER_ADDR, MASTER_PORT if the user passed them (-genv). The rank on this host is
# learned from the other ranks.
PMI: Final = TableLauncher(
    name="pmi",
    description="mpiexec of MPICH 3.2 and before, mpiexec.gforker",
    verified=True,
    start="start with mpiexec, which sets both; mpiexec -pmi-port does not",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
)
