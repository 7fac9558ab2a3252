"""Kubeflow's PyTorchJob and TrainJob, with one process in each pod."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import (
    Environ,
    Fact,
    LaunchEnvironment,
    check_exported_world_size,
    read_port,
    read_text,
    require_int,
)
from rankwise.errors import LauncherEnvironmentError


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
