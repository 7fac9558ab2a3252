"""The rendezvous of the launchers that a terminal has started: it decides which hosts meet, and has their store."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistStoreError, Store
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from rankwise._launch.hosts.relay import TerminalLink
from rankwise._launch.other_hosts.messages import MEET, Meeting, Watching
from rankwise._launch.other_hosts.watched_hosts import WatchedHosts
from rankwise._rendezvous.static_rendezvous import FixedNodesRendezvous
from rankwise._rendezvous.store import serve
from rankwise.errors import JoinError, LaunchError

_STORE_SECONDS: Final = 300.0
# How often a value is asked for that is not there yet.
_PAUSE_SECONDS: Final = 0.02


class TerminalRendezvous(FixedNodesRendezvous):
    """The rendezvous of one launcher.

    The launchers meet in the terminal's store. Their ranks cannot reach that, and meet in one that the launcher of the
    first host serves, on a free port.
    """

    def __init__(self, terminal: TerminalLink, run_id: str) -> None:
        self._terminal = terminal
        self._run_id = run_id
        self._meeting = 0
        self._of_ranks: Store | None = None

    def get_backend(self) -> str:
        return "rankwise-terminal"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next meeting, for as long as the terminal keeps this host as a spare.

        Raises:
            LaunchError: This host cannot serve the store of the ranks, or another one is lost.
        """
        self._of_ranks = None  # that of the attempt before
        meeting: Meeting = self._terminal.ask(MEET)
        self._meeting = meeting.number
        store = TerminalStore(self._terminal, meeting.number, f"{meeting.number}/")
        if meeting.node_rank == 0:
            self._of_ranks, port = _serve(one_host=meeting.one_host)
            store.set("port", str(port))
        address = RendezvousStoreInfo(meeting.address, int(store.get("port")))
        return RendezvousInfo(store, meeting.node_rank, meeting.num_nodes, address)

    def watch(self, timeout: Callable[[], float | None]) -> WatchedHosts:
        """Return the other hosts of this meeting, as the terminal sees them."""
        return HostsOfMeeting(self._terminal, self._meeting, timeout)


class HostsOfMeeting(WatchedHosts):
    """The other hosts of a meeting."""

    def __init__(self, terminal: TerminalLink, meeting: int, timeout: Callable[[], float | None]) -> None:
        self._terminal = terminal
        self._meeting = meeting
        super().__init__(timeout)

    @property
    def lost(self) -> str:
        return self._terminal.lost.get(self._meeting, "")

    def _send(self, message: Watching) -> None:
        self._terminal.send(message)


class TerminalStore(Store):
    """The store in the terminal: what a launcher uses of one."""

    def __init__(self, terminal: TerminalLink, meeting: int, prefix: str) -> None:
        super().__init__()
        self._terminal = terminal
        self._meeting = meeting
        self._prefix = prefix
        self._timeout = timedelta(seconds=_STORE_SECONDS)

    def with_prefix(self, prefix: str) -> TerminalStore:
        """Return the part of the store whose keys have a prefix."""
        return TerminalStore(self._terminal, self._meeting, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: Any) -> None:  # noqa: ANN401 - str or bytes
        self._ask("set", key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        found: bytes = self._ask("get", key)
        return found

    def add(self, key: str, value: int) -> int:
        total: int = self._ask("add", key, value)
        return total

    def check(self, keys: list[str]) -> bool:
        is_set: bool = self._terminal.ask("check", [self._prefix + key for key in keys])
        return is_set

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys.

        Raises:
            DistStoreError: They were not set in time.
            LaunchError: A host of the meeting is lost, perhaps the one that should have set them.
        """
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self.check(keys):
            if lost := self._terminal.lost.get(self._meeting):
                raise LaunchError(f"{lost}, while the hosts met")
            if time.monotonic() > deadline:
                raise DistStoreError(f"{', '.join(keys)} is not in the terminal's store")
            time.sleep(_PAUSE_SECONDS)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def _ask(self, operation: str, key: str, *arguments: Any) -> Any:  # noqa: ANN401 - those of the operation
        return self._terminal.ask(operation, self._prefix + key, *arguments)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _serve(*, one_host: bool) -> tuple[Store, int]:
    try:
        return serve(one_host=one_host, timeout=_STORE_SECONDS)
    except (OSError, JoinError) as error:
        raise LaunchError(f"this host cannot serve the store where the ranks meet: {error}") from error
