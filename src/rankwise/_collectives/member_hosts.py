"""The hosts of the members of a group. The first member of each host receives values from other hosts for all of it."""

from __future__ import annotations

from collections.abc import Sequence

from rankwise._collectives.serialization import Header
from rankwise._comm.comm import Comm


class MemberHosts:
    """The hosts of a group, as a member needs them.

    Attributes:
        own: The group rank of this member.
        here: The group ranks of the members on its host.
        first_elsewhere: The group rank of the first member on each other host.
    """

    def __init__(self, comm: Comm) -> None:
        hosts: Sequence[str] = comm.hosts or [""] * comm.size
        self.own = comm.control.require_member()
        self.here = [member for member, host in enumerate(hosts) if host == hosts[self.own]]
        self.first_elsewhere = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[self.own]]

    @property
    def is_alone(self) -> bool:
        """This member is the only one on its host."""
        return len(self.here) == 1

    def awaited(self, headers: Sequence[Header], senders: Sequence[int]) -> dict[int, int]:
        """Return the lengths of the values that this member receives from other hosts for its own, by their index."""
        if self.own != self.here[0]:
            return {}
        lengths = {index: header.file_bytes for index, header in enumerate(headers) if senders[index] not in self.here}
        return {index: nbytes for index, nbytes in lengths.items() if nbytes}
