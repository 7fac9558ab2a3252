"""The topology of a rank: its index in the world, on its node, and that of its node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rankwise._arguments import as_integer
from rankwise._environment.facts import TOPOLOGY_FIELDS, Fact, LaunchEnvironment, check_topology
from rankwise.errors import NotJoinedError, TopologyError

__all__ = ["Topology"]

# The source of facts that come from a process group which other code opened.
OPEN_GROUP: Final = "the process group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The topology of one rank. Complete, and checked when created; nodes may have different numbers of ranks.

    Attributes:
        rank: This process among all, from 0.
        world_size: The number of processes.
        local_rank: This process among those on its node, from 0.
        local_world_size: The number of processes on its node.
        node_rank: The index of its node among all, from 0.
        num_nodes: The number of nodes.

    Raises:
        InvalidArgumentError: One is not an integer.
        TopologyError: The numbers are inconsistent.

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
        """Return the topology in a launch environment.

        Raises:
            NotJoinedError: The launcher does not set all of it; the message names the missing numbers.
        """
        known = reading.known_topology()
        missing = [name for name in TOPOLOGY_FIELDS if name not in known]
        if missing:
            raise NotJoinedError(unknown(reading, *missing))
        return cls(**{name: fact.value for name, fact in known.items()})


def unknown(reading: LaunchEnvironment, *names: str) -> str:
    """Return the error message for numbers that a launch environment lacks."""
    source = OPEN_GROUP if reading.rank.source == OPEN_GROUP else f"the variables of launcher {reading.launcher!r}"
    return f"{' and '.join(names)} cannot be known from {source}; call rankwise.init(), which asks the other ranks"
