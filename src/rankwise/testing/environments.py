"""The variables that launchers set, for tests of code that reads them: one mapping for each rank, as recorded.

Only the variables that launchers set are included. A test adds the others, such as PATH, if it needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rankwise._arguments import as_text, integer
from rankwise._environment.facts import MAX_PORT
from rankwise.testing._placement import compressed, integer_in_range, iter_tasks, tasks_per_node

Environs = list[dict[str, str]]

# Instead of recorded paths, which would mean nothing here. Code that opens this one fails.
_NOWHERE: Final = "/run/example"
# Slurm's numbers have 32 bits.
_LARGEST: Final = 2**32 - 1


def fake_torchrun(
    tasks: int | Sequence[int] = 1,
    *,
    nodes: int | None = None,
    address: str = "localhost",
    port: int = 29500,
    run_id: str = "none",
) -> Environs:
    """Return the variables that `torchrun` sets for each rank. As recorded from torch 2.13.

    Local.

    Args:
        tasks: The number of ranks on every node, or a sequence with the number on each.
        nodes: The number of nodes, if `tasks` is an integer.
        address: The address of the rendezvous: MASTER_ADDR.
        port: The port of the rendezvous: MASTER_PORT.
        run_id: The value of `--rdzv-id`.

    Raises:
        InvalidArgumentError: These are not numbers of tasks, or another argument cannot be used.

    Example:
        >>> [environ["LOCAL_RANK"] for environ in fake_torchrun(2, nodes=2)]
        ['0', '1', '0', '1']
    """
    per_node = tasks_per_node(tasks, nodes)
    size = str(sum(per_node))
    number = integer_in_range(1, MAX_PORT, port, "port")
    address, run_id = as_text(address, "address"), as_text(run_id, "run_id")
    return [
        {
            "GROUP_RANK": str(task.node_rank),
            "GROUP_WORLD_SIZE": str(len(per_node)),
            "LOCAL_RANK": str(task.local_rank),
            "LOCAL_WORLD_SIZE": str(task.local_world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(number),
            "OMP_NUM_THREADS": "1",
            "RANK": str(task.rank),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(task.rank),
            "ROLE_WORLD_SIZE": size,
            "TORCHELASTIC_ERROR_FILE": _NOWHERE,
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "WORLD_SIZE": size,
        }
        for task in iter_tasks(per_node)
    ]


def fake_slurm(
    tasks: int | Sequence[int] = 1,
    *,
    nodes: int | None = None,
    name: str = "node",
    job_id: int = 1,
    step_id: int = 0,
    cpus_per_task: int | None = None,
) -> Environs:
    """Return the variables that `srun` sets for each task. As recorded from Slurm 22.05.

    Nodes are filled one after the other.

    Local.

    Args:
        tasks: The number of tasks on every node, as with `--ntasks-per-node`, or a sequence with the number on each.
        nodes: The number of nodes, if `tasks` is an integer.
        name: The name of a node without its number.
        job_id: The job's number.
        step_id: The step's number within the job.
        cpus_per_task: The value of `--cpus-per-task`; None if it is not given.

    Raises:
        InvalidArgumentError: These are not numbers of tasks, or another argument cannot be used.

    Example:
        >>> [environ["SLURM_LOCALID"] for environ in fake_slurm(nodes=2, tasks=[2, 1])]
        ['0', '1', '0']
    """
    per_node, name = tasks_per_node(tasks, nodes), as_text(name, "name")
    cpus_each = None if cpus_per_task is None else integer_in_range(1, _LARGEST, cpus_per_task, "cpus_per_task")
    cpus = [count * (cpus_each or 1) for count in per_node]
    shared = _slurm_job_variables(
        per_node,
        cpus,
        name,
        integer_in_range(0, _LARGEST, job_id, "job_id"),
        integer_in_range(0, _LARGEST, step_id, "step_id"),
    )
    if integer(tasks) is not None:
        shared["SLURM_NTASKS_PER_NODE"] = str(per_node[0])
    if cpus_each is not None:
        shared["SLURM_CPUS_PER_TASK"] = str(cpus_each)
    return [
        {
            **shared,
            "SLURMD_NODENAME": f"{name}{task.node_rank}",
            "SLURM_CPUS_ON_NODE": str(cpus[task.node_rank]),
            "SLURM_GTIDS": ",".join(
                str(rank) for rank in range(task.first_rank, task.first_rank + task.local_world_size)
            ),
            "SLURM_LOCALID": str(task.local_rank),
            "SLURM_NODEID": str(task.node_rank),
            "SLURM_PROCID": str(task.rank),
            "SLURM_TASK_PID": str(1000 + task.rank),
            "SLURM_TOPOLOGY_ADDR": f"{name}{task.node_rank}",
        }
        for task in iter_tasks(per_node)
    ]


def fake_openmpi(tasks: int | Sequence[int] = 1, *, nodes: int | None = None, name: str = "node") -> Environs:
    """Return the variables that `mpirun` of Open MPI 5 sets for each rank. As recorded from 5.0.11.

    Local. No variable has the node rank: OMPI_COMM_WORLD_NODE_RANK is a rank within its node.

    Args:
        tasks: The number of ranks on every node, or a sequence with the number on each.
        nodes: The number of nodes, if `tasks` is an integer.
        name: The name of a node without its number.

    Raises:
        InvalidArgumentError: These are not numbers of tasks, or another argument cannot be used.

    Example:
        >>> [environ["OMPI_COMM_WORLD_LOCAL_SIZE"] for environ in fake_openmpi([2, 1])]
        ['2', '2', '1']
    """
    per_node, name = tasks_per_node(tasks, nodes), as_text(name, "name")
    size = str(sum(per_node))
    sizes = ("OMPI_COMM_WORLD_SIZE", "OMPI_MCA_num_procs", "OMPI_UNIVERSE_SIZE", "OMPI_WORLD_SIZE")
    shared = {**_OPENMPI_VARIABLES, **dict.fromkeys(sizes, size)}
    if len(per_node) == 1:
        shared["PMIX_PREFIX"] = _NOWHERE
    job = f"prterun-{name}0-1000"
    return [
        {
            **shared,
            **dict.fromkeys(_PMIX_SERVER_VARIABLES, f"{job}@0.{task.node_rank};tcp4://127.0.0.1:29500"),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(task.local_rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(task.local_world_size),
            "OMPI_COMM_WORLD_NODE_RANK": str(task.local_rank),
            "OMPI_COMM_WORLD_RANK": str(task.rank),
            "OMPI_WORLD_LOCAL_SIZE": str(task.local_world_size),
            "PMIX_HOSTNAME": f"{name}{task.node_rank}",
            "PMIX_NAMESPACE": f"{job}@1",
            "PMIX_RANK": str(task.rank),
        }
        for task in iter_tasks(per_node)
    ]


def fake_pmi(tasks: int | Sequence[int] = 1, *, nodes: int | None = None, name: str = "node") -> Environs:
    """Return the variables that `mpiexec` of MPICH (Hydra) sets for each rank. As recorded from 5.0.2.

    Local. No variable has the node rank.

    Args:
        tasks: The number of ranks on every node, or a sequence with the number on each.
        nodes: The number of nodes, if `tasks` is an integer.
        name: The name of a node without its number.

    Raises:
        InvalidArgumentError: These are not numbers of tasks, or another argument cannot be used.

    Example:
        >>> [environ["MPI_LOCALRANKID"] for environ in fake_pmi([2, 1])]
        ['0', '1', '0']
    """
    per_node, name = tasks_per_node(tasks, nodes), as_text(name, "name")
    shared = {"HYDI_CONTROL_FD": "7"} if len(per_node) == 1 else {}
    return [
        {
            **shared,
            "MPI_LOCALNRANKS": str(task.local_world_size),
            "MPI_LOCALRANKID": str(task.local_rank),
            "PMI_FD": str(11 + task.local_rank),
            "PMI_HOSTNAME": f"{name}{task.node_rank}",
            "PMI_RANK": str(task.rank),
            "PMI_SIZE": str(sum(per_node)),
        }
        for task in iter_tasks(per_node)
    ]


_PMIX_SERVER_VARIABLES: Final = [f"PMIX_SERVER_URI{version}" for version in ("2", "21", "3", "4", "41")]
_OPENMPI_VARIABLES: Final = {
    "OMPI_ARGV": "",
    "OMPI_COMMAND": _NOWHERE,
    "OMPI_FILE_LOCATION": _NOWHERE,
    "OMPI_LIBDIR_LOC": _NOWHERE,
    "OMPI_MCA_PREFIXES": "mca,opal,ompi,atomic,memheap,scoll,spml,sshmem,bml,coll,fbtl,fcoll,fs,hook,io,mtl,op,osc,"
    "part,pml,sharedfp,topo,vprotocol,accelerator,allocator,backtrace,btl,dl,hwloc,if,installdirs,memchecker,memcpy,"
    "memory,mpool,patcher,rcache,reachable,shmem,smsc,threads,timer",
    "OMPI_MCA_cpu_type": "x86_64",
    "OMPI_MCA_initial_wdir": _NOWHERE,
    "OMPI_NUM_APP_CTX": "1",
    "OMPI_TOOL_NAME": "mpirun",
    "OMPI_VERSION": "5.0.11",
    "PMIX_BFROP_BUFFER_TYPE": "PMIX_BFROP_BUFFER_NON_DESC",
    "PMIX_GDS_MODULE": "shmem2,hash",
    "PMIX_PARAM_FILE_PASSED": "1",
    "PMIX_SECURITY_MODE": "native",
    "PMIX_SERVER_TMPDIR": _NOWHERE,
    "PMIX_SYSTEM_TMPDIR": "/tmp",  # noqa: S108 - as recorded
    "PMIX_VERSION": "5.0.11rc1",
    "PRTE_LAUNCHED": "1",
    "PRTE_SHARED_FS": "FALSE",
}


def _slurm_job_variables(
    per_node: Sequence[int], cpus: Sequence[int], name: str, job_id: int, step_id: int
) -> dict[str, str]:
    """Return the variables that are the same for all tasks of a step."""
    tasks, nodes = str(sum(per_node)), str(len(per_node))
    hosts = f"{name}0" if len(per_node) == 1 else f"{name}[0-{len(per_node) - 1}]"
    job = {"JOBID": str(job_id), "JOB_ID": str(job_id), "STEPID": str(step_id), "STEP_ID": str(step_id)}
    counts = {
        "JOB_CPUS_PER_NODE": compressed(cpus),
        "JOB_NODELIST": hosts,
        "JOB_NUM_NODES": nodes,
        "NNODES": nodes,
        "NODELIST": hosts,
        "NPROCS": tasks,
        "NTASKS": tasks,
        "STEP_NODELIST": hosts,
        "STEP_NUM_NODES": nodes,
        "STEP_NUM_TASKS": tasks,
        "STEP_TASKS_PER_NODE": compressed(per_node),
        "TASKS_PER_NODE": compressed(per_node),
    }
    rest = {
        "CLUSTER_NAME": "lab",
        "CONF": _NOWHERE,
        "JOB_GID": "0",
        "JOB_NAME": "example",
        "JOB_PARTITION": "main",
        "JOB_UID": "0",
        "JOB_USER": "root",
        "LAUNCH_NODE_IPADDR": "192.0.2.1",
        "PRIO_PROCESS": "0",
        "SRUN_COMM_HOST": "192.0.2.1",
        "SRUN_COMM_PORT": "29501",
        "STEP_LAUNCHER_PORT": "29501",
        "SUBMIT_DIR": _NOWHERE,
        "SUBMIT_HOST": "login",
        "TOPOLOGY_ADDR_PATTERN": "node",
        "UMASK": "0022",
        "WORKING_CLUSTER": "lab:192.0.2.1:29502:9728:109",
    }
    return {f"SLURM_{key}": value for key, value in {**job, **counts, **rest}.items()}
