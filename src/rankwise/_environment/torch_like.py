"""Launchers that set torch's variables: torchrun, those built on it, Lightning, others; and the user, by hand."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import (
    MAX_RANKS,
    Environ,
    Fact,
    LaunchEnvironment,
    one_node,
    read_int,
    read_port,
    read_text,
    require_int,
    says_others,
)
from rankwise._environment.nesting import RUN, is_rankwise_launch
from rankwise.errors import LauncherEnvironmentError


class Torchrun:
    """torchrun (torch.distributed.elastic).

    Reads, all set by its agent: TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and
    GROUP_WORLD_SIZE (the index and the number of agents, one for each node), MASTER_ADDR, MASTER_PORT,
    TORCHELASTIC_USE_AGENT_STORE ("True" if the agent hosts the store), TORCHELASTIC_RESTART_COUNT.
    """

    name: str = "torchrun"
    description: str = "torchrun, torchx"
    variables: tuple[str, ...] = (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
        "TORCHELASTIC_RESTART_COUNT",
    )
    verified: bool = True

    def present(self, environ: Environ) -> bool:
        return "TORCHELASTIC_RUN_ID" in environ

    def read(self, environ: Environ) -> LaunchEnvironment:
        because = "TORCHELASTIC_RUN_ID is: a process started by torchrun has both; unset those of another run"
        attempt = read_int(environ, "TORCHELASTIC_RESTART_COUNT")
        return LaunchEnvironment(
            launcher=self.name,
            rank=require_int(environ, "RANK", because=because),
            world_size=require_int(environ, "WORLD_SIZE", because=because),
            local_rank=require_int(environ, "LOCAL_RANK", because=because),
            local_world_size=read_int(environ, "LOCAL_WORLD_SIZE"),
            node_rank=read_int(environ, "GROUP_RANK"),
            num_nodes=read_int(environ, "GROUP_WORLD_SIZE"),
            host=read_text(environ, "MASTER_ADDR"),
            port=read_port(environ, "MASTER_PORT"),
            job=read_text(environ, "TORCHELASTIC_RUN_ID"),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=attempt.value if attempt else 0,
        )


class RankwiseLaunch(Torchrun):
    """`rankwise launch`, `rankwise.launch`, and the ranks of tests.

    Reads the variables of torchrun, and RANKWISE_RUN_ID, which repeats TORCHELASTIC_RUN_ID, MASTER_ADDR and
    MASTER_PORT: under a torchrun that one of these ranks has started, they differ.
    """

    name: str = "rankwise"
    description: str = "rankwise launch, rankwise.launch, rank tests"
    variables: tuple[str, ...] = (*Torchrun.variables, RUN)

    def present(self, environ: Environ) -> bool:
        return super().present(environ) and is_rankwise_launch(environ)

    def read(self, environ: Environ) -> LaunchEnvironment:
        if not self.present(environ):
            raise LauncherEnvironmentError(
                f"launcher='rankwise' reads TORCHELASTIC_RUN_ID and {RUN}, and {RUN} is "
                f"{environ.get(RUN, 'not set')}; start with rankwise launch"
            )
        return super().read(environ)


class AccelerateLaunch(Torchrun):
    """`accelerate launch` with several processes.

    Reads the variables of torchrun; and recognizes those that begin with ACCELERATE_, with which it passes its options.
    A single process, as of `accelerate launch --cpu`, has no variables of a rank and is a world of one.
    """

    name: str = "accelerate"
    description: str = "accelerate launch"

    def present(self, environ: Environ) -> bool:
        return super().present(environ) and any(name.startswith("ACCELERATE_") for name in environ)


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


# A worker of Ray Train.
# Reads: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT, set by the torch
# backend; and recognizes RAY_JOB_ID beside them, which all actors of Ray have: the others have no rank.
RAY_TRAIN: Final = TorchVariables(
    name="ray", description="TorchTrainer of Ray Train", markers=("LOCAL_RANK", "NODE_RANK", "RAY_JOB_ID")
)

# A process of the `deepspeed` command.
# Reads: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, CROSS_RANK and CROSS_SIZE (the index and the number of nodes),
# MASTER_ADDR and MASTER_PORT, set by its launcher on each node.
DEEPSPEED: Final = TorchVariables(
    name="deepspeed", description="deepspeed", markers=("LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE")
)


_OUTER_SIZES: Final = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Lightning:
    """A process of Lightning's own launcher, as of `Trainer(devices=4, strategy="ddp")` without torchrun.

    Reads: LOCAL_RANK, NODE_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which it sets in the first process of each
    node too. There is no RANK and no number of processes on a node. On the first node the rank is LOCAL_RANK; on the
    others it is computed if only one number of processes on a node fits. SLURM_STEP_NUM_TASKS, OMPI_COMM_WORLD_SIZE or
    PMI_SIZE above 1 show that another launcher has started the processes.
    """

    name: Final = "lightning"
    description: Final = "Lightning's subprocess launcher"
    variables: Final = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", *_OUTER_SIZES)
    verified: Final = True

    def present(self, environ: Environ) -> bool:
        own = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        alone = all(environ.get(name, "1") == "1" for name in _OUTER_SIZES)
        return alone and "RANK" not in environ and all(name in environ for name in own)

    def read(self, environ: Environ) -> LaunchEnvironment:
        because = "launcher='lightning' reads it: Lightning's subprocess launcher sets it"
        local_rank = require_int(environ, "LOCAL_RANK", because=because)
        node_rank = require_int(environ, "NODE_RANK", because=because)
        world_size = require_int(environ, "WORLD_SIZE", because=because)
        rank = Fact(local_rank.value, local_rank.source)
        if node_rank.value != 0:
            each = _processes_per_node(world_size, node_rank, local_rank)
            rank = Fact(node_rank.value * each + local_rank.value, "NODE_RANK, LOCAL_RANK and WORLD_SIZE")
        return LaunchEnvironment(
            launcher=self.name,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            node_rank=node_rank,
            host=read_text(environ, "MASTER_ADDR"),
            port=read_port(environ, "MASTER_PORT"),
        )


def _processes_per_node(world_size: Fact[int], node_rank: Fact[int], local_rank: Fact[int]) -> int:
    """Return the number of processes on a node, the same on all, if only one fits.

    Raises:
        LauncherEnvironmentError: None fits, or several do.
    """
    largest = min(world_size.value, MAX_RANKS) // (node_rank.value + 1)
    fitting = [each for each in range(local_rank.value + 1, largest + 1) if world_size.value % each == 0]
    if len(fitting) == 1:
        return fitting[0]
    numbers = f"WORLD_SIZE={world_size.value}, NODE_RANK={node_rank.value} and LOCAL_RANK={local_rank.value}"
    problem = f"leave open which of {fitting[:4]} processes a node has" if fitting else "contradict each other"
    raise LauncherEnvironmentError(f"{numbers} {problem}; set RANK for each process, or start with torchrun")
