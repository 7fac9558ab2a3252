"""The hosts of a world that each have a launcher, and how these find each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The hosts of a world, each with a launcher of its own, and how these find each other. As torchrun's flags say.

    Attributes:
        min_nodes, max_nodes: The least and the greatest number of hosts.
        backend: "static", "c10d", or another that torch knows.
        endpoint: Where they meet: "host:port".
        run_id: The same for all hosts of one run.
        node_rank: Which of them this one is, where the backend does not decide that.
        options: The backend's own.
    """

    min_nodes: int
    max_nodes: int
    backend: str
    endpoint: str
    run_id: str
    node_rank: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
