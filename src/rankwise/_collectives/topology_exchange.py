"""The topology of a session over a process group that other code opened, completed from the hosts of all ranks."""

from __future__ import annotations

import socket
from collections import Counter

from rankwise._collectives.all_gather import all_gather
from rankwise._environment.facts import Fact
from rankwise._net.host import host_id
from rankwise._session.session import SessionState


def exchange_topology(session: SessionState, *, local_rank: int | None = None) -> None:
    """Complete this rank's topology from the hosts of all ranks, where no launcher provides it.

    Collective over the session.

    Args:
        session: The current session.
        local_rank: This process's rank on its node, if it is known otherwise.
    """
    nodes = all_gather((socket.gethostname(), host_id()), group=session.world_group)
    own = nodes[session.rank]
    counted = {
        "local_rank": nodes[: session.rank].count(own) if local_rank is None else local_rank,
        "local_world_size": Counter(nodes)[own],
        "node_rank": list(dict.fromkeys(nodes)).index(own),
        "num_nodes": len(set(nodes)),
    }
    known = session.reading.known_topology()
    unknown = {name: Fact(value, "the other ranks") for name, value in counted.items() if name not in known}
    session.reading = session.reading.with_topology(**unknown)
