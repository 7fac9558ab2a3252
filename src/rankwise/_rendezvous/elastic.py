"""Where ranks meet: on one host a store that the launcher serves on loopback, and that outlives them."""

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
from rankwise._rendezvous.nodes import Nodes
from rankwise._rendezvous.static_rendezvous import FixedRendezvous, NumberedHosts
from rankwise._rendezvous.store import serve
from rankwise.errors import JoinError, LaunchError

_TIMEOUT: Final = 300.0


class LoopbackRendezvous(FixedRendezvous):
    """Torch's rendezvous for one agent, which is this process.

    Nobody else can take the port, and only this host can reach it.
    """

    def __init__(self, run_id: str, ports: Sequence[int] = (0,)) -> None:
        self._run_id = run_id
        self._store, self._port = _serve_first(ports)

    def get_backend(self) -> str:
        return "rankwise-loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        # The only agent talks to itself about who its ranks are: not where other users of this host can join in.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))


def _serve_first(ports: Sequence[int]) -> tuple[Store, int]:
    """Serve a store on the first of these ports that is free, and return it with the port.

    Raises:
        LaunchError: None is, or this process cannot reach it.
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


def between_hosts(nodes: Nodes) -> RendezvousHandler:
    """Return the rendezvous of the launchers of several hosts: ours if they are numbered, else torch's."""
    if nodes.backend == "static":
        return NumberedHosts(nodes)
    options: dict[str, Any] = {**nodes.options}
    return registry.get_rendezvous_handler(
        RendezvousParameters(
            backend=nodes.backend,
            endpoint=nodes.endpoint,
            run_id=nodes.run_id,
            min_nodes=nodes.min_nodes,
            max_nodes=nodes.max_nodes,
            **options,
        )
    )
