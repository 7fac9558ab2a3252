"""A transfer of data of one group over the connections of the session."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from rankwise._comm.control.flow import Flow
from rankwise._comm.control.links.links import Links


class SocketFlow(Flow):
    """Such a transfer, of one thread."""

    def __init__(
        self, links: Links, group: int, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview]
    ) -> None:
        """Begin a transfer.

        Args:
            links: The connections.
            group: The id of the group.
            outgoing: The data for each rank.
            incoming: The buffer for the data of each rank.
        """
        self._links = links
        self._group = group
        self._unsent = dict(outgoing)
        self._unfilled = {rank: len(buffer) for rank, buffer in incoming.items()}
        self._ranks = {*outgoing, *incoming}
        self._seen = 0
        for rank, buffer in incoming.items():
            links.peer(rank).fill(group, buffer)

    @property
    def pending(self) -> AbstractSet[int]:
        return self._unsent.keys() | self._unfilled.keys()

    def step(self) -> int:
        self._seen = self._links.loop.num_events
        moved = 0
        for rank, data in list(self._unsent.items()):
            peer = self._links.peer(rank)
            taken = peer.send_data(self._group, data)
            moved += taken
            self._unsent[rank] = data[taken:]
            if taken == len(data) and not peer.num_unsent:  # nothing else would send what the connection has not taken
                del self._unsent[rank]
        for rank, before in list(self._unfilled.items()):
            peer = self._links.peer(rank)
            peer.receive(for_data=True)
            self._unfilled[rank] = rest = peer.num_unfilled(self._group)
            moved += before - rest
            if not rest:
                del self._unfilled[rank]
        return moved

    def wait(self, seconds: float) -> None:
        self._links.wait(map(self._links.peer, self._ranks), self._seen, seconds)

    def end(self) -> None:
        for rank in self._ranks:
            peer = self._links.peer(rank)
            if rank in self._unfilled:
                peer.fill(self._group, memoryview(bytearray()))
            self._links.update_interest(peer)  # data of this group was in the way of others
