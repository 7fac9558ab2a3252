"""Services that start a process on each host or in each pod: SageMaker, AzureML, Kubeflow, Kubernetes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from rankwise._environment.facts import (
    MAX_RANKS,
    Environ,
    Fact,
    LaunchEnvironment,
    check_exported_world_size,
    read_port,
    read_text,
    require_int,
)
from rankwise._environment.mpi import OPEN_MPI
from rankwise._environment.table_launcher import TableLauncher
from rankwise.errors import LauncherEnvironmentError

# How many characters of a list an error message shows.
_SHOWN: Final = 200


class SageMaker:
    """A host of a SageMaker job without a distribution, where the script runs once on each host.

    Reads: SM_HOSTS (["algo-1", "algo-2"]) and SM_CURRENT_HOST, set by SageMaker's containers; TRAINING_JOB_NAME; and
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Jobs with a distribution start the script with torchrun or mpirun. Because
    many scripts run on each host for themselves, these variables count only with WORLD_SIZE, or if the program names
    this launcher.
    """

    name: Final = "sagemaker"
    description: Final = "a host of a SageMaker job, with one process on each, if WORLD_SIZE is set"
    variables: Final = (
        *("SM_CURRENT_HOST", "SM_HOSTS", "TRAINING_JOB_NAME"),
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
    )
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        return "SM_CURRENT_HOST" in environ and "SM_HOSTS" in environ and "WORLD_SIZE" in environ

    def read(self, environ: Environ) -> LaunchEnvironment:
        hosts, own = hosts_of(environ), environ.get("SM_CURRENT_HOST")
        if own not in hosts:
            raise LauncherEnvironmentError(
                f"SM_CURRENT_HOST={own!r} is not in SM_HOSTS={environ['SM_HOSTS'][:_SHOWN]}; SageMaker sets both"
            )
        rank = Fact(hosts.index(own), "SM_CURRENT_HOST in SM_HOSTS")
        size = Fact(len(hosts), "SM_HOSTS")
        check_exported_world_size(environ, size)
        each = "one process on each host of SM_HOSTS"
        return LaunchEnvironment(
            launcher=self.name,
            rank=rank,
            world_size=size,
            local_rank=Fact(0, each),
            local_world_size=Fact(1, each),
            node_rank=rank,
            num_nodes=size,
            host=read_text(environ, "MASTER_ADDR") or Fact(hosts[0], "SM_HOSTS"),
            port=read_port(environ, "MASTER_PORT"),
            job=read_text(environ, "TRAINING_JOB_NAME"),
        )


def hosts_of(environ: Environ) -> list[str]:
    """Return the hosts of the job, in their order.

    Raises:
        LauncherEnvironmentError: SM_HOSTS is not set, or is not a list of different names.
    """
    text = environ.get("SM_HOSTS")
    if text is None:
        raise LauncherEnvironmentError("SM_HOSTS is not set, but launcher='sagemaker' reads it: SageMaker sets it")
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    names = isinstance(hosts, list) and all(isinstance(host, str) and host for host in hosts)
    if not names or not 0 < len(hosts) <= MAX_RANKS or len(set(hosts)) < len(hosts):
        raise LauncherEnvironmentError(f'SM_HOSTS={text[:_SHOWN]!r} is not a list like ["algo-1", "algo-2"]')
    return sorted(hosts)


_ADDRESSES: Final = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")


class AzureMl(TableLauncher):
    """A rank of an MPI job of AzureML, which Open MPI starts.

    Reads: the variables of Open MPI; AZ_BATCH_MASTER_NODE ("10.0.0.4:6000", whose port is another service's), or
    AZ_BATCHAI_MPI_MASTER_NODE where that is not set. AzureML's PyTorch jobs set RANK, LOCAL_RANK and so on instead.
    """

    __slots__ = ()

    def present(self, environ: Environ) -> bool:
        return super().present(environ) and _address(environ) is not None

    def read(self, environ: Environ) -> LaunchEnvironment:
        reading = super().read(environ)
        return replace(reading, host=reading.host or _address(environ))


def _address(environ: Environ) -> Fact[str] | None:
    for name in _ADDRESSES:
        host, colon, port = environ.get(name, "").rpartition(":")
        host = host if colon and port.isdecimal() else environ.get(name, "")
        if host:
            return Fact(host.removeprefix("[").removesuffix("]"), name)
    return None


AZURE_ML: Final = AzureMl(
    name="azureml",
    description="an MPI job of AzureML",
    start=OPEN_MPI.start,
    rank=OPEN_MPI.rank,
    world_size=OPEN_MPI.world_size,
    local_rank=OPEN_MPI.local_rank,
    local_world_size=OPEN_MPI.local_world_size,
    job=OPEN_MPI.job,
    recognized_by=OPEN_MPI.recognized_by,
    other_variables=_ADDRESSES,
)


class Kubeflow:
    """A pod of Kubeflow that is a rank itself: PET_NPROC_PER_NODE is 1, and no launcher runs in the pod.

    Reads: PET_NODE_RANK, PET_NNODES, PET_NPROC_PER_NODE, PET_MASTER_ADDR and PET_MASTER_PORT, set by the training
    operator (v1) and by the Trainer (v2) for torchrun, which is the launcher of pods with several processes. Version 1
    also sets RANK and WORLD_SIZE, which take precedence. An elastic job has no PET_NODE_RANK: its pods need torchrun.
    """

    name: Final = "kubeflow"
    description: Final = "a pod of Kubeflow's PyTorchJob or TrainJob, with one process in each"
    variables: Final = (
        *("PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
    )
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        return "PET_NODE_RANK" in environ and "PET_NNODES" in environ and environ.get("PET_NPROC_PER_NODE") == "1"

    def read(self, environ: Environ) -> LaunchEnvironment:
        because = "launcher='kubeflow' reads it: Kubeflow sets it in each pod"
        rank = require_int(environ, "PET_NODE_RANK", because=because)
        size = require_int(environ, "PET_NNODES", because=because)
        processes = require_int(environ, "PET_NPROC_PER_NODE", because=because)
        if processes.value != 1:
            raise LauncherEnvironmentError(
                f"PET_NPROC_PER_NODE={processes.value}, so that a pod is not one rank; start the script with torchrun, "
                "which reads the PET_ variables"
            )
        check_exported_world_size(environ, size)
        each = Fact(1, "PET_NPROC_PER_NODE")
        return LaunchEnvironment(
            launcher=self.name,
            rank=rank,
            world_size=size,
            local_rank=Fact(0, "PET_NPROC_PER_NODE"),
            local_world_size=each,
            node_rank=rank,
            num_nodes=size,
            host=read_text(environ, "PET_MASTER_ADDR") or read_text(environ, "MASTER_ADDR"),
            port=read_port(environ, "PET_MASTER_PORT") or read_port(environ, "MASTER_PORT"),
        )


# A pod of an indexed Job of Kubernetes, or of a JobSet with one replicated Job, that is a rank itself.
# Reads: JOB_COMPLETION_INDEX, set by Kubernetes; and WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which the manifest has to
# set: the number of completions, and the name of the first pod, <job>-0.<service>. Without WORLD_SIZE each pod runs
# alone, as the pods of most indexed Jobs do.
KUBERNETES: Final = TableLauncher(
    name="kubernetes",
    description="a pod of an indexed Job or JobSet whose manifest sets WORLD_SIZE",
    start="Kubernetes sets the index in the pods of an indexed Job, and the manifest has to set WORLD_SIZE",
    rank="JOB_COMPLETION_INDEX",
    world_size="WORLD_SIZE",
    recognized_by=("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
)
