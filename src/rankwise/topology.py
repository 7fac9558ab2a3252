"""Where a rank stands: in its world, among the nodes, on its node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rankwise._arguments import as_integer
from rankwise._environment.facts import TOPOLOGY_FIELDS, Fact, LaunchEnvironment, check_topology
from rankwise.errors import NotJoinedError, TopologyError

# The source of what a process group that other code opened says.
OPEN_GROUP: Final = "the process group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The place of one rank. Complete, and checked when built; nodes may hold different numbers of ranks.

    Attributes:
        rank: This process among all, from 0.
        world_size: How many processes there are.
        local_rank: This process among those on its node, from 0.
        local_world_size: How many processes are on its node.
        node_rank: Its node among all, from 0.
        num_nodes: How many nodes there are.

    Raises:
        InvalidArgumentError: One is no integer.
        TopologyError: The numbers do not fit together.

    Example:
        >>> Topology(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, num_nodes=2).is_rank_zero
        False
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int

    def __post_init__(self) -> None:
        for name in TOPOLOGY_FIELDS:
            object.__setattr__(self, name, as_integer(getattr(self, name), name))
        check_topology({name: Fact(getattr(self, name), "Topology") for name in TOPOLOGY_FIELDS})
        if (self.num_nodes == 1) != (self.local_world_size == self.world_size):
            raise TopologyError(
                f"{self.local_world_size} of {self.world_size} ranks on this node do not fit num_nodes={self.num_nodes}"
            )

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank zero of the world."""
        return self.rank == 0

    @classmethod
    def of(cls, reading: LaunchEnvironment) -> Topology:
        """Build the topology that a reading describes.

        Raises:
            NotJoinedError: The launcher's variables leave some of it out; the message names what.
        """
        known = reading.known_topology()
        missing = [name for name in TOPOLOGY_FIELDS if name not in known]
        if missing:
            raise NotJoinedError(unknown(reading, *missing))
        return cls(**{name: fact.value for name, fact in known.items()})


def unknown(reading: LaunchEnvironment, *names: str) -> str:
    """Return the message for numbers that a reading leaves out."""
    if reading.rank.source == OPEN_GROUP:
        return (
            f"{' and '.join(names)} cannot be known: other code opened the process group, and no variable agrees "
            "with it and says more; pass local_rank and local_world_size to rankwise.init(), or set RANK, WORLD_SIZE, "
            "LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK and NUM_NODES for each process"
        )
    return (
        f"{' and '.join(names)} cannot be known from the variables of launcher {reading.launcher!r}; "
        "call rankwise.init(), which asks the other ranks"
    )
