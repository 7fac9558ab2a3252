"""Variables set by hand, or by a launcher that keeps to torch's names: Ray Train, Composer, DeepSpeed, a script."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import (
    Environ,
    LaunchEnvironment,
    one_node,
    read_int,
    read_port,
    read_text,
    require_int,
    says_others,
)
from rankwise.errors import LauncherEnvironmentError

# The names of torch, and of launchers and scripts that use them.
NAMES: Final = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("GROUP_RANK", "NODE_RANK", "CROSS_RANK", "GROUP_WORLD_SIZE", "NUM_NODES", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
# The values of PET_NPROC_PER_NODE with which torchrun starts a process for each device.
_OF_EACH_DEVICE: Final = ("auto", "cpu", "gpu")


class TorchVariables:
    """RANK, WORLD_SIZE and their relatives, under an optional prefix.

    Reads: RANK, WORLD_SIZE; LOCAL_RANK; LOCAL_WORLD_SIZE (LOCAL_SIZE: DeepSpeed); GROUP_RANK (torchrunx), NODE_RANK
    (Ray Train, composer) or CROSS_RANK (DeepSpeed); GROUP_WORLD_SIZE, NUM_NODES or CROSS_SIZE; MASTER_ADDR,
    MASTER_PORT; and PET_NPROC_PER_NODE, which shows that RANK counts the pods of a Kubeflow job, not processes.
    """

    verified: Final = True

    def __init__(self, *, name: str, description: str, prefix: str = "", markers: tuple[str, ...] = ()) -> None:
        self.name = name
        self.description = description
        self.prefix = prefix
        own = (f"{prefix}{name}" for name in NAMES)
        self.variables = tuple(dict.fromkeys((*own, *(() if prefix else ("PET_NPROC_PER_NODE",)), *markers)))
        self._markers = markers

    def present(self, environ: Environ) -> bool:
        has_all = all(name in environ for name in (f"{self.prefix}RANK", *self._markers))
        return has_all and (bool(self.prefix or self._markers) or not _means_alone(environ))

    def read(self, environ: Environ) -> LaunchEnvironment:
        prefix = self.prefix
        self._refuse_pod(environ)
        rank = require_int(
            environ,
            f"{prefix}RANK",
            because=f"launcher={self.name!r} reads it: set {prefix}RANK and {prefix}WORLD_SIZE for each process",
        )
        world_size = require_int(
            environ,
            f"{prefix}WORLD_SIZE",
            because=f"{prefix}RANK={rank.value} is: set both, or neither to run alone",
        )
        local_world_size = read_int(environ, f"{prefix}LOCAL_WORLD_SIZE", f"{prefix}LOCAL_SIZE")
        node_rank = read_int(environ, f"{prefix}GROUP_RANK", f"{prefix}NODE_RANK", f"{prefix}CROSS_RANK")
        num_nodes = read_int(environ, f"{prefix}GROUP_WORLD_SIZE", f"{prefix}NUM_NODES", f"{prefix}CROSS_SIZE")
        implied = one_node(local_world_size, world_size)
        if implied is not None:
            node_rank, num_nodes = node_rank or implied[0], num_nodes or implied[1]
        return LaunchEnvironment(
            launcher=self.name,
            rank=rank,
            world_size=world_size,
            local_rank=read_int(environ, f"{prefix}LOCAL_RANK"),
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            host=read_text(environ, f"{prefix}MASTER_ADDR"),
            port=read_port(environ, f"{prefix}MASTER_PORT"),
        )

    def _refuse_pod(self, environ: Environ) -> None:
        """Refuse a Kubeflow pod that has to run several processes: its RANK is the index of the pod.

        Where the job does not give their number, PET_NPROC_PER_NODE is "auto", and WORLD_SIZE the number of pods.
        """
        processes = environ.get("PET_NPROC_PER_NODE", "1")
        if self.prefix or "LOCAL_RANK" in environ or processes == "1" or processes in _OF_EACH_DEVICE:
            return
        raise LauncherEnvironmentError(
            f"RANK={environ.get('RANK')} counts the pods of a Kubeflow job and not processes, for "
            f"PET_NPROC_PER_NODE={processes} and LOCAL_RANK is not set; start the script with torchrun, which reads "
            "the PET_ variables"
        )


def _means_alone(environ: Environ) -> bool:
    """Return whether RANK is set as by a script for itself, when no launcher has started it."""
    rank, world_size = environ.get("RANK", "").strip(), environ.get("WORLD_SIZE", "").strip()
    is_complete = (rank, world_size) == ("0", "1")
    return not is_complete and not says_others(environ, "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
