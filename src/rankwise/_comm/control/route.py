"""The way of frames between the members of a group: through one member of each host, which leads it.

A member sends its frame to the leader of its host. The leader sends the frames of its host to the other leaders in one
bundle, and all frames to the members of its host in another. So with `n` members on each of `h` hosts, an exchange
takes `2 h (n - 1) + h (h - 1)` messages; frames from each member to each other one would be `h n (h n - 1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

# Up to this size each member sends its frame to every other one, as if each were on a host of its own: that takes fewer
# steps one after the other.
MAX_DIRECT_SIZE: Final = 4


class Route:
    """The members through which a member of a group sends and receives frames, all by group rank.

    Attributes:
        leader: The leader of its host.
        neighbours: The other members on its host.
        other_leaders: The leaders of the other hosts.
    """

    def __init__(self, ranks: Sequence[int], own: int, host: Callable[[int], str]) -> None:
        """Find the way of the frames of a group.

        Args:
            ranks: The global ranks of the members, by group rank.
            own: The group rank of this process.
            host: Returns the id of the host of a global rank.
        """
        hosts = [host(rank) for rank in ranks] if len(ranks) > MAX_DIRECT_SIZE else [str(rank) for rank in ranks]
        self._leader_of = [hosts.index(name) for name in hosts]
        self._own = own
        self.leader = self._leader_of[own]
        self.neighbours = [member for member, name in enumerate(hosts) if name == hosts[own] and member != own]
        self.other_leaders = sorted(set(self._leader_of) - {self.leader})

    @property
    def is_leader(self) -> bool:
        """This member leads its host."""
        return self.leader == self._own

    def source(self, member: int) -> int:
        """Return the member from which this one receives the frame of another one."""
        if not self.is_leader:
            return self.leader
        return member if member in self.neighbours else self._leader_of[member]
