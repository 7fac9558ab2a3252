"""The connections of the watcher of a host to those of other hosts: lines of JSON, which are validated when read.

The watcher of the first host is connected to each other one. The ranks that started them have made the connections.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankwise._net.json_lines import MAX_LINE_BYTES, parse_object
from rankwise._net.polling import Descriptor, wait_readable
from rankwise._text import ranks_text

_PIECE_BYTES: Final = 1 << 16
# The first host reads when it has taken its own samples.
_SEND_SECONDS: Final = 6.0
# The key of the pipe to the rank, among those of hosts.
_RANK: Final = -1


@dataclass(slots=True, eq=False)
class OtherHost:
    """Another host.

    Attributes:
        name: Its name.
        ranks: Its ranks.
        connection: The connection to its watcher; None if there is none, or not any more.
        why_silent: Why nothing is heard of it.
    """

    name: str
    ranks: Sequence[int]
    connection: socket.socket | None
    why_silent: str
    received: bytearray = field(default_factory=bytearray)

    def __str__(self) -> str:
        return f"{self.name} ({ranks_text(self.ranks)})"


class RankGoneError(Exception):
    """The rank that has started this watcher has closed the pipe."""


class OtherHosts:
    """The other hosts that the watcher of this one is connected to."""

    def __init__(self, settings: Sequence[dict[str, Any]], pipe: int) -> None:
        """Take over the connections.

        Args:
            settings: The attributes of each other host; `descriptor` is that of the connection, or -1.
            pipe: The pipe to the rank.
        """
        self._pipe = pipe
        self.hosts = [
            OtherHost(
                each["name"],
                each["ranks"],
                socket.socket(fileno=each["descriptor"]) if each["descriptor"] >= 0 else None,
                each["why_silent"],
            )
            for each in settings
        ]
        for host in self.hosts:
            if host.connection is not None:
                host.connection.settimeout(_SEND_SECONDS)

    def tell(self, message: dict[str, Any]) -> bool:
        """Send a message to the watchers of all other hosts; return whether it went to any."""
        line = json.dumps(message).encode() + b"\n"
        for host, connection in self._opened():
            try:
                connection.sendall(line)
            except OSError:
                self._drop(host, "the process that watches it does not read what it is sent")
        return bool(self._opened())

    def wait(self, seconds: float) -> list[tuple[OtherHost, dict[str, Any]]]:
        """Wait for messages, at most for that long, and return them.

        Raises:
            RankGoneError: The rank has closed the pipe.
        """
        opened = self._opened()
        waited_for: dict[int, Descriptor] = {_RANK: self._pipe}
        waited_for.update({number: connection for number, (_, connection) in enumerate(opened)})
        messages = []
        for number in wait_readable(waited_for, max(0.0, seconds)):
            if number == _RANK:
                raise RankGoneError
            host, connection = opened[number]
            messages += [(host, message) for message in self._read(host, connection)]
        return messages

    def collect(self, key: str, seconds: float) -> dict[OtherHost, Any]:
        """Wait until each watcher has sent a message with a key, at most for that long, and return their values.

        Other messages are dropped.
        """
        deadline = time.monotonic() + seconds
        found: dict[OtherHost, Any] = {}
        while {host for host, _ in self._opened()} - found.keys() and (left := deadline - time.monotonic()) > 0:
            found.update({host: message[key] for host, message in self.wait(left) if key in message})
        return found

    def _opened(self) -> list[tuple[OtherHost, socket.socket]]:
        return [(host, host.connection) for host in self.hosts if host.connection is not None]

    def _read(self, host: OtherHost, connection: socket.socket) -> list[dict[str, Any]]:
        try:
            piece = connection.recv(_PIECE_BYTES)
        except OSError:
            piece = b""
        host.received += piece
        if not piece or len(host.received) > MAX_LINE_BYTES:
            self._drop(host, "the process that watches it has ended, or the host is lost")
            return []
        if b"\n" not in piece:
            return []
        *lines, rest = host.received.split(b"\n")
        host.received = rest
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):  # of a watcher of another version
                messages.append(parse_object(bytes(line)))
        return messages

    def _drop(self, host: OtherHost, why: str) -> None:
        connection, host.connection, host.why_silent = host.connection, None, why
        if connection is not None:
            connection.close()
