"""The watchdog of a host: a process that notices when another host is lost, and ends what cannot end by itself.

A launcher or a rank that waits in compiled code for a host that has no power runs neither handlers nor threads that
need its lock. So this process watches. The watchdog of the first host accepts those of the others; each sends a line
twice a second. A host is lost if nothing has come for as long as its ranks wait for each other, or for some seconds
once a rank has failed, or if its connection was closed without a last line. Then the launcher is told, and killed with
its ranks if it does not end.

It ends with the connection to its launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankwise._launch.forwarded_signals import leave_to_ranks
from rankwise._launch.reaper import kill_launch
from rankwise._net.acceptor import Client
from rankwise._net.connecting import connect_to_any, resolved_text
from rankwise._net.polling import EventLoop, wait_readable
from rankwise._net.rank_proof import AcceptedProofs, send_hello, send_proof
from rankwise.errors import printable

_BEAT_SECONDS: Final = 0.5
# A rank that waits for another one has its own error first, which names the call.
_AFTER_RANKS_SECONDS: Final = 0.5
# How long nothing may come when a rank has failed, perhaps because its call has waited for the lost host long enough.
_AFTER_FAILURE_SECONDS: Final = 3.0
# How long a launcher that was told may take until it ends, or starts the next attempt.
_END_SECONDS: Final = 3.0
_MEET_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.1
_IDENTIFY_SECONDS: Final = 5.0
_LONGEST_LINE: Final = 4096
_MOST_STRANGERS: Final = 256


@dataclass(slots=True, eq=False)
class WatchedHost:
    """The connection to the watchdog of another host; `number` is -1 until it has proven to be one."""

    connection: socket.socket
    number: int
    name: str = ""
    heard: float = field(default_factory=time.monotonic)
    received: bytearray = field(default_factory=bytearray)


class HostWatchdog:
    """The watchdog of one host."""

    def __init__(self, launcher: socket.socket, settings: dict[str, Any]) -> None:
        self._launcher = launcher
        self._settings = settings
        self._host: int = settings["host"]
        self._seconds = float(settings["seconds"])
        self._has_failed = False
        self._have_met = False
        self._meet_until = time.monotonic() + _MEET_SECONDS
        self._from_launcher = b""
        self._lost = ""
        self._has_ended = False
        self._kill_at = float("inf")
        self._loop = EventLoop()
        self._loop.register(launcher, self._hear_launcher)
        self._peers: dict[int, WatchedHost] = {}
        self._strangers: dict[Client, float] = {}
        self._proofs = AcceptedProofs(bytes.fromhex(settings["key"]))

    def run(self) -> None:
        """Watch until the launcher ends."""
        if self._settings["listener"] >= 0:
            listener = socket.socket(fileno=self._settings["listener"])
            listener.setblocking(False)
            self._loop.register(listener, lambda: self._accept(listener))
        else:
            self._connect()
        beat = time.monotonic()
        while not self._has_ended:
            self._loop.run_once(max(0.0, min(beat, self._kill_at) - time.monotonic()))
            now = time.monotonic()
            if now >= beat:
                beat = now + _BEAT_SECONDS
                self._beat(now)
            if now >= self._kill_at:
                self._kill()
                return
        self._tell({"end": True})

    def _connect(self) -> None:
        """Connect to the watchdog of the first host."""
        address, port, key = self._settings["address"], self._settings["port"], bytes.fromhex(self._settings["key"])
        why = ""
        while time.monotonic() < self._meet_until:
            try:
                connection = connect_to_any(address, port, _IDENTIFY_SECONDS)
                connection.settimeout(_IDENTIFY_SECONDS)
                if send_proof(connection, key, send_hello(connection, self._host)):
                    self._add(WatchedHost(connection, 0))
                    return
                connection.close()
                why = "what listens there has another secret, or is another program"
            except OSError as error:
                why = error.strerror or str(error)
            if wait_readable({0: self._launcher}, _PAUSE_SECONDS):  # before it has met the others, it only ends
                self._hear_launcher()
        self._lose(
            0,
            f"is lost: its watchdog was not reached at {address}:{port} within {_MEET_SECONDS:g} s: {why}"
            f"{resolved_text(address)}; hosts of a job have to reach each other at any port",
        )

    def _add(self, peer: WatchedHost) -> None:
        peer.connection.setblocking(False)
        self._peers[peer.number] = peer
        self._loop.register(peer.connection, lambda: self._hear(peer))
        self._tell({"name": socket.gethostname()})
        if self._host or len(self._peers) == self._settings["hosts"] - 1:
            self._have_met = True
            self._report({"met": True})

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # it has disconnected, or there are no descriptors left
            return
        connection.setblocking(False)
        client = Client(connection, time.monotonic(), str(address[0]))
        self._strangers[client] = time.monotonic()
        self._loop.register(connection, lambda: self._identify(client))
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _identify(self, client: Client) -> None:
        is_connected = client.read(self._proofs.missing(client))
        number = self._proofs.rank_of(client)
        if number is not None and 0 < number < self._settings["hosts"] and number not in self._peers:
            self._forget(client)
            self._add(WatchedHost(client.connection, number))
        elif not is_connected or number is not None:
            self._drop(client)

    def _forget(self, client: Client) -> None:
        self._loop.unregister(client.connection)
        self._strangers.pop(client, None)
        self._proofs.forget(client)

    def _drop(self, client: Client) -> None:
        self._forget(client)
        client.connection.close()

    def _hear(self, peer: WatchedHost) -> None:
        """Read what another watchdog has sent."""
        try:
            piece = peer.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._remove(peer)
            self._lose(peer.number, "has ended: its connection was closed", peer.name)
            return
        peer.heard = time.monotonic()
        peer.received += piece
        *lines, rest = peer.received.split(b"\n")
        peer.received = rest[:_LONGEST_LINE]
        for line in lines:
            self._handle(peer, bytes(line))

    def _handle(self, peer: WatchedHost, line: bytes) -> None:
        try:
            message = json.loads(line)
            peer.name = printable(str(message.get("name", peer.name)))[:64]
            if message.get("end"):
                self._remove(peer)
            elif "lost" in message:
                self._lose(int(message["lost"]), printable(str(message["why"])), printable(str(message["of"])))
        except (ValueError, TypeError, AttributeError, KeyError):  # of a watchdog of another version
            return

    def _remove(self, peer: WatchedHost) -> None:
        if self._peers.pop(peer.number, None) is not None:
            self._loop.unregister(peer.connection)
            peer.connection.close()

    def _beat(self, now: float) -> None:
        """Tell the others that this host is alive, and look for those that have told nothing."""
        for client, since in list(self._strangers.items()):
            if now - since > _IDENTIFY_SECONDS:
                self._drop(client)
        self._tell({"name": socket.gethostname()})
        limit = self._seconds + _AFTER_RANKS_SECONDS
        if self._has_failed:
            limit = min(limit, _AFTER_FAILURE_SECONDS)
        for peer in list(self._peers.values()):
            if (silence := now - peer.heard) > limit:
                self._remove(peer)
                self._lose(peer.number, f"is lost: nothing was heard of it for {silence:.0f} s", peer.name)
        if not self._have_met and now > self._meet_until:
            absent = min(set(range(1, self._settings["hosts"])) - set(self._peers))
            self._lose(absent, f"is lost: its watchdog did not connect within {_MEET_SECONDS:g} s")

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in list(self._peers.values()):
            # A connection that is full has heard nothing for long, and is about to be lost.
            with contextlib.suppress(OSError):
                peer.connection.send(json.dumps(message).encode() + b"\n")

    def _lose(self, number: int, why: str, name: str = "") -> None:
        """Tell the launcher, and the other hosts, that one is lost."""
        if self._lost:
            return
        self._kill_at = time.monotonic() + _END_SECONDS
        text = f"host {number}{f' ({name})' if name else ''} {why}"
        self._report({"lost": text})
        self._tell({"lost": number, "why": why, "of": name})
        self._lost = text

    def _report(self, message: dict[str, Any]) -> None:
        """Tell the launcher."""
        with contextlib.suppress(OSError):
            self._launcher.send(json.dumps(message).encode() + b"\n")

    def _hear_launcher(self) -> None:
        try:
            piece = self._launcher.recv(_LONGEST_LINE)
        except OSError:
            piece = b""
        if not piece:  # it was killed: the other hosts notice that no last line has come
            sys.exit(0)
        self._from_launcher += piece
        *lines, self._from_launcher = self._from_launcher.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._seconds = float(message.get("seconds", self._seconds))
            self._has_ended = self._has_ended or "end" in message
            self._has_failed = self._has_failed or "failed" in message
            if "restarts" in message:
                self._kill_at = float("inf")

    def _kill(self) -> None:
        """Kill the ranks of this host and its launcher, which waits in compiled code."""
        sys.stderr.write(f"rankwise: {self._lost}; the launcher of this host did not end, and is killed\n")
        sys.stderr.flush()
        kill_launch(self._settings["launch_id"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._settings["launcher"], signal.SIGKILL)


def main(search_path: Sequence[str]) -> None:  # noqa: ARG001 - of processes that import a script
    """Watch. The last argument is the descriptor of the connection to the launcher, which sends the settings."""
    leave_to_ranks()
    launcher = socket.socket(fileno=int(sys.argv[-1]))
    received = b""
    while not received.endswith(b"\n"):
        piece = launcher.recv(1)  # not more: the next line, which may have come already, is for the watchdog
        if not piece:
            return
        received += piece
    HostWatchdog(launcher, json.loads(received)).run()
