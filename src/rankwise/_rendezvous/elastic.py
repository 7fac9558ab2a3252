"""The rendezvous handlers for torch's elastic agent: on one host, a store on loopback that is kept between restarts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch.distributed import DistStoreError, HashStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    registry,
)

from rankwise._net.addresses import LOOPBACK
from rankwise._rendezvous.nodes import STATIC, Nodes
from rankwise._rendezvous.static_rendezvous import FixedNodesRendezvous, StaticRendezvous
from rankwise._rendezvous.store import serve
from rankwise.errors import JoinError, LaunchError

_TIMEOUT: Final = 300.0


class LoopbackRendezvous(FixedNodesRendezvous):
    """The rendezvous of a single agent, which is this process.

    No other process can take the port, and only this host can reach it.
    """

    def __init__(self, run_id: str, ports: Sequence[int] = (0,)) -> None:
        self._run_id = run_id
        self._store, self._port = _serve_first(ports)

    def get_backend(self) -> str:
        return "rankwise-loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        # The only agent exchanges its ranks with itself: in a store that other users of the host cannot reach.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))


def _serve_first(ports: Sequence[int]) -> tuple[Store, int]:
    """Serve a store on the first of these ports that is free, and return it with the port.

    Raises:
        LaunchError: No port is free, or this process cannot connect to its own store.
    """
    for port in ports:
        try:
            return serve(one_host=True, timeout=_TIMEOUT, port=port)
        except (JoinError, DistStoreError) as error:
            raise LaunchError(str(error)) from error
        except OSError as error:
            problem = error
    raise LaunchError(
        f"port {', '.join(map(str, ports))} of this host cannot be used: {problem.strerror}; name another, or none"
    ) from problem


def multi_node_rendezvous(nodes: Nodes) -> RendezvousHandler:
    """Return the rendezvous of the launchers of several hosts: rankwise's own for "static", else torch's."""
    if nodes.backend == STATIC:
        return StaticRendezvous(nodes)
    options: dict[str, Any] = {**nodes.options}
    return registry.get_rendezvous_handler(
        RendezvousParameters(
            backend=nodes.backend,
            endpoint=nodes.address,
            run_id=nodes.run_id,
            min_nodes=nodes.min_nodes,
            max_nodes=nodes.num_nodes,
            local_addr=nodes.local_address or None,
            **options,
        )
    )
