"""The static rendezvous: launchers of several hosts, each with a given node rank, meet at the first host's store.

Like torch's, but its errors name the missing hosts, those that were started twice, and a port that is in use.
"""

from __future__ import annotations

import socket
import time
from typing import Final

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from rankwise._net.addresses import is_loopback
from rankwise._net.job_secret import JobSecret
from rankwise._rendezvous.endpoint import parse_address
from rankwise._rendezvous.nodes import Nodes
from rankwise._rendezvous.signed_store import part_of, signed
from rankwise._rendezvous.store import connect, serve, wait_for
from rankwise._rendezvous.waiting import WaitingReport
from rankwise._text import ranks_text
from rankwise.errors import InvalidArgumentError, JoinError, JoinTimeoutError, LaunchError, printable

_TIMEOUT: Final = 600.0
_RETRY_SECONDS: Final = 0.2
# How often the hosts that have come are looked at, while others are waited for.
_SHOW_SECONDS: Final = 1.0
# How much of another host's text an error message shows.
_SHOWN: Final = 20


class FixedNodesRendezvous(RendezvousHandler):
    """A rendezvous of torch's with a fixed set of nodes, whose store the launcher serves; no node can join later."""

    _closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def shutdown(self) -> bool:
        self._closed = True
        return True


class StaticRendezvous(FixedNodesRendezvous):
    """The rendezvous of launchers that are given their node rank and the number of nodes."""

    def __init__(self, nodes: Nodes, secret: JobSecret | None, waiting: WaitingReport) -> None:
        self._secret = secret
        self._waiting = waiting
        host, port = parse_address(nodes.address)
        self._nodes = nodes
        self._host, self._port = host.value, port.value
        try:
            self._timeout = float(nodes.options.get("timeout", _TIMEOUT))
        except ValueError as error:
            raise InvalidArgumentError(
                f"timeout={nodes.options['timeout']!r}, for hosts to meet, is no number of seconds"
            ) from error
        self._store: Store | None = None
        self._rounds = 0

    def get_backend(self) -> str:
        return "static"

    def get_run_id(self) -> str:
        return self._nodes.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + self._timeout
        if self._store is None:
            store = self._serve() if self._nodes.node_rank == 0 else self._connect(deadline)
            self._store = signed(store, self._secret)
        self._rounds += 1
        store = part_of(self._store, f"rankwise-agents/{self._nodes.run_id}/{self._rounds}")
        try:
            self._register(store, deadline)
        except RuntimeError as error:
            if isinstance(error, LaunchError):
                raise
            if isinstance(error, JoinError):  # an entry without the secret of this job
                raise LaunchError(str(error)) from error
            raise LaunchError(
                f"the launcher of host 0 at {self._nodes.address} has gone while host {self._nodes.node_rank} waited "
                f"for the others; see its output: {error}"
            ) from error
        address = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(store, self._nodes.node_rank, self._nodes.num_nodes, address)

    def _serve(self) -> Store:
        try:
            store, _ = serve(one_host=is_loopback(self._host), timeout=self._timeout, port=self._port)
        except OSError as error:
            raise LaunchError(
                f"host 0 cannot listen on port {self._port}, where all hosts have to meet: {error.strerror}; "
                "name another port on all hosts, or end what holds it"
            ) from error
        return store

    def _connect(self, deadline: float) -> Store:
        """Connect to the store of the first host, whose launcher may be started later than this one."""
        self._waiting.begin()

        def show() -> str:
            self._waiting.show_first(self._nodes.address)
            return ""

        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                return connect(self._host, self._port, timeout=left, lost=show).store
            except JoinError as error:
                if isinstance(error, JoinTimeoutError) or time.monotonic() > deadline:
                    raise LaunchError(
                        f"host {self._nodes.node_rank} did not find host 0 within {self._timeout:g} s: {error}"
                    ) from error
            time.sleep(_RETRY_SECONDS)

    def _register(self, store: Store, deadline: float) -> None:
        """Register this host in the store, and wait until all hosts have done so.

        Raises:
            LaunchError: A host did not register in time, or the hosts do not form one world.
        """
        own, number = self._nodes.node_rank, self._nodes.num_nodes
        if store.add(f"count/{own}", 1) > 1:
            raise LaunchError(f"two launchers are host {own} of {number}; give each its own number")
        store.set(f"name/{own}", socket.gethostname())
        store.set(f"host/{own}", str(number))
        keys = [f"host/{other}" for other in range(number)]
        self._waiting.begin()
        while not (complete := wait_for(store, keys, timeout=_SHOW_SECONDS)) and time.monotonic() < deadline:
            self._waiting.show_numbered(self._names(store))
        if not complete:
            absent = [other for other in range(number) if not store.check([keys[other]])]
            raise LaunchError(
                f"{ranks_text(absent).replace('rank', 'host')} of {number} did not connect to {self._nodes.address} "
                f"within {self._timeout:g} s; was a launcher started there, and with the same number of hosts?"
            )
        reported = {other: printable(store.get(key).decode(errors="replace")) for other, key in enumerate(keys)}
        if set(reported.values()) != {str(number)}:
            text = ", ".join(f"host {other} of {count[:_SHOWN]}" for other, count in reported.items())
            raise LaunchError(f"the hosts were given different numbers of hosts: {text}")

    def _names(self, store: Store) -> dict[int, str]:
        """Return the names of the hosts that have registered."""
        numbers = [number for number in range(self._nodes.num_nodes) if store.check([f"host/{number}"])]
        return {number: printable(store.get(f"name/{number}").decode(errors="replace")) for number in numbers}
