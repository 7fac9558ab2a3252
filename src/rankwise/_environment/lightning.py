"""Lightning's subprocess launcher, which starts the script again for each further device of its node."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import (
    MAX_RANKS,
    Environ,
    Fact,
    LaunchEnvironment,
    read_port,
    read_text,
    require_int,
)
from rankwise.errors import LauncherEnvironmentError

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
