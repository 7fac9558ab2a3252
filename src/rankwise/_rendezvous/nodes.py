"""The hosts of a world that each have a launcher, and their rendezvous."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The hosts of a world, each with a launcher of its own, and their rendezvous, as with torchrun's options.

    Attributes:
        min_nodes, max_nodes: The least and the greatest number of hosts.
        backend: "static", "c10d", or another that torch knows.
        endpoint: The address of the rendezvous: "host:port".
        run_id: The id of the run, the same on all hosts.
        node_rank: The index of this host, if the backend does not choose it.
        options: The options of the backend.
    """

    min_nodes: int
    max_nodes: int
    backend: str
    endpoint: str
    run_id: str
    node_rank: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
