"""The rendezvous of agents that one launcher has started: it decides which hosts meet, and in which order."""

from __future__ import annotations

import socket
from typing import Any, Final

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from rankwise._launch.forkserver.ipc import receive_message
from rankwise._launch.hosts.host_messages import Meet, Ready, Serve, Serving
from rankwise._launch.hosts.relay_console import Relay
from rankwise._net.job_secret import JobSecret
from rankwise._rendezvous.signed_store import part_of, signed
from rankwise._rendezvous.static_rendezvous import FixedNodesRendezvous
from rankwise._rendezvous.store import connect, serve
from rankwise.errors import JoinError, LaunchError

_STORE_SECONDS: Final = 300.0
_CONNECT_SECONDS: Final = 60.0


class LauncherRendezvous(FixedNodesRendezvous):
    """The rendezvous of one agent. The first host of each round serves a new store."""

    def __init__(self, connection: socket.socket, relay: Relay, run_id: str, secret: JobSecret) -> None:
        """Prepare.

        Args:
            connection: Where the messages of the launcher come from.
            relay: Where those to the launcher go.
            run_id: The id of the run.
            secret: The secret of the job.
        """
        self._connection = connection
        self._relay = relay
        self._run_id = run_id
        self._secret = secret
        self._store: Store | None = None

    def get_backend(self) -> str:
        return "rankwise-launcher"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round, for as long as the launcher keeps this host as a spare.

        Raises:
            LaunchError: The store of the first host cannot be reached, or the launcher has gone.
        """
        self._store = None  # that of the round before, which this host may have served
        self._relay.send(Ready())
        meeting = self._receive()
        while isinstance(meeting, Serve):
            self._store = None
            self._store, port = self._serve(meeting)
            self._relay.send(Serving(port))
            meeting = self._receive()
        if self._store is None:
            self._store = self._connect(meeting)
        store = part_of(signed(self._store, self._secret), f"rankwise-agents/{self._run_id}")
        address = RendezvousStoreInfo(meeting.address, meeting.port)
        return RendezvousInfo(store, meeting.node_rank, meeting.num_nodes, address)

    def _receive(self) -> Any:  # noqa: ANN401 - Serve or Meet
        try:
            return receive_message(self._connection)
        except (EOFError, OSError) as error:
            raise LaunchError("the launcher has gone") from error

    def _serve(self, wanted: Serve) -> tuple[Store, int]:
        try:
            return serve(one_host=wanted.one_host, timeout=_STORE_SECONDS)
        except (OSError, JoinError) as error:
            raise LaunchError(f"this host cannot serve the store where the others meet it: {error}") from error

    def _connect(self, meeting: Meet) -> Store:
        try:
            return connect(meeting.address, meeting.port, timeout=_CONNECT_SECONDS).store
        except JoinError as error:
            raise LaunchError(
                f"this host cannot reach the first host at {meeting.address}, port {meeting.port}: {error}; name with "
                "--master-addr an address of the first host that the others can reach, and let no firewall be between "
                "them"
            ) from error
