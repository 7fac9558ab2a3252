"""Where the ranks of one host meet: a store that the launcher serves on loopback, and that outlives them."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Final

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from rankwise.rendezvous import LOOPBACK

_TIMEOUT: Final = timedelta(seconds=300)


class LoopbackRendezvous(RendezvousHandler):
    """Torch's rendezvous for one agent, which is this process.

    The port is bound by us and handed over open, so nobody else can take it, and only this host can reach it.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        listener = socket.create_server((LOOPBACK, 0), backlog=4096)
        self._port: int = listener.getsockname()[1]
        self._store: Store = TCPStore(
            LOOPBACK,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "rankwise-loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore("rankwise-agent", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def shutdown(self) -> bool:
        self._closed = True
        return True
