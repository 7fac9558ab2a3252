"""The hosts of a world that each have a launcher, and their rendezvous."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rankwise._arguments import as_integer, as_text
from rankwise._rendezvous.endpoint import parse_address
from rankwise.errors import InvalidArgumentError, shown

# The backend in which each launcher is given the index of its host.
STATIC: Final = "static"
# The backend in which a terminal has started the launchers of all hosts, and decides which of them meet.
TERMINAL: Final = "terminal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The hosts of a world, each with a launcher of its own, and their rendezvous, as with torchrun's options.

    Attributes:
        num_nodes: The number of hosts; with another backend than "static", the greatest number.
        address: Where the launchers meet: "host:port", a free port of host 0, the same on all hosts.
        node_rank: The index of this host, from 0; ignored by other backends than "static", which choose it.
        min_nodes: The least number of hosts with which the ranks are started; `num_nodes` by default.
        backend: "static", "c10d", or another that torch knows.
        run_id: The id of the run, the same on all hosts.
        local_address: The address of this host for the others, if a backend other than "static" is to use it; "" for
            the one that torch finds.
        options: The options of the backend. That of "static" is "timeout", in seconds, 600 by default.

    Raises:
        InvalidArgumentError: A number is no integer or out of range, or the address is malformed.

    Example:
        >>> Nodes(num_nodes=2, node_rank=1, address="gpu-01:29500").min_nodes
        2
    """

    num_nodes: int
    address: str
    node_rank: int = 0
    min_nodes: int = 0
    backend: str = STATIC
    run_id: str = "none"
    options: Mapping[str, str] = field(default_factory=dict)
    local_address: str = ""

    def __post_init__(self) -> None:
        numbers = {name: as_integer(getattr(self, name), name) for name in ("num_nodes", "node_rank", "min_nodes")}
        numbers["min_nodes"] = numbers["min_nodes"] or numbers["num_nodes"]
        for name, value in numbers.items():
            object.__setattr__(self, name, value)
        for name in ("address", "backend", "run_id", "local_address"):
            as_text(getattr(self, name), name)
        if not 1 <= self.min_nodes <= self.num_nodes:
            raise InvalidArgumentError(
                f"min_nodes={shown(self.min_nodes)} and num_nodes={shown(self.num_nodes)} are no numbers of hosts: "
                "1 at least, and the least number is not above the greatest"
            )
        if self.backend != STATIC:
            return
        if not 0 <= self.node_rank < self.num_nodes:
            raise InvalidArgumentError(
                f"node_rank={self.node_rank} is not one of {self.num_nodes} hosts, counted from 0"
            )
        parse_address(self.address)
