"""The watchdog of a host: the process that notices when another host is lost, and ends what cannot end by itself.

A launcher or a rank that waits in compiled code for a host that has no power runs neither handlers nor threads that
need its lock. So this process watches, and does nothing that may block. Each watchdog says twice a second that it is
there, and all of them meet at a hub, which tells the others when one is lost: when nothing has come from it for as long
as its ranks wait for each other, or for some seconds once a rank has failed, or when its connection was closed without
a last message. Then the launchers are told, and killed with their ranks if they do not end.

How a launch has begun decides where the hub is, and who starts whom:

- With `--nnodes` each host has a launcher of its own, which starts its watchdog for each attempt. That of the first
  host accepts the connections of the others, which prove that they belong to the job (`PeerWatchdog`). It ends with
  the connection to its launcher.
- With `--ssh` or `--srun` the hub is the terminal, and ssh starts the watchdog, which starts the launcher. Standard
  input and output are the connection to the terminal; the watchdog is the only one that writes there, and hands on
  what the launcher sends. When the terminal is gone, however that has happened, everything on the host is killed
  (`TerminalWatchdog`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rankwise._launch.forkserver.ipc import READ_BYTES, pop_messages, serialize, whole_messages
from rankwise._launch.forwarded_signals import leave_to_ranks
from rankwise._launch.interpreter import interpreter_command
from rankwise._launch.other_hosts.messages import Alive, Deliver, Hello, HostEnded, Start, Watching
from rankwise._launch.reaper import become_subreaper, kill_descendants, kill_launch
from rankwise._launch.spec import own_environ
from rankwise._net.acceptor import Client
from rankwise._net.connecting import connect_to_any, resolved_text
from rankwise._net.json_lines import decode_line, encode_line
from rankwise._net.polling import READABLE, WRITABLE, EventLoop, poll, wait_readable
from rankwise._net.rank_proof import AcceptedProofs, prove
from rankwise.errors import LaunchError

BEAT_SECONDS: Final = 0.5
# How long the ranks wait for each other, until one has reported the timeout of its session: that of `init()`.
UNKNOWN_SECONDS: Final = 300.0
# A rank that waits for another one has its own error first, which names the call.
_AFTER_RANKS_SECONDS: Final = 0.5
# How long nothing may come when a rank has failed, perhaps because its call has waited for the lost host long enough.
_AFTER_FAILURE_SECONDS: Final = 3.0
# How long a launcher that was told may take until it ends, or starts the next attempt.
END_SECONDS: Final = 3.0
# A watchdog whose own process was stopped for longer than this has heard nothing because of that.
_LONGEST_PAUSE: Final = 2.0
# How long a terminal may be silent: it may be far away, and its host busy.
_SILENT_SECONDS: Final = 30.0
# With more that the terminal has not read, the launcher is not read.
_BACKLOG_BYTES: Final = 1 << 18
# "CLIENT PORT SERVER PORT", set by sshd.
_CONNECTION: Final = "SSH_CONNECTION"
_MEET_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.1
_IDENTIFY_SECONDS: Final = 5.0
_LONGEST_LINE: Final = 4096
_MOST_STRANGERS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """From a launcher, first: what its watchdog needs.

    Attributes:
        host, num_hosts: The number of the host, and of all.
        address, port: Those at which the watchdog of the first host listens.
        key: The secret that the connections prove to know.
        listener: The descriptor of the listening socket on the first host; -1 on others.
        launch_id: The id of the launch, by which its processes are found.
        launcher: The process that has started the watchdog.
    """

    host: int
    num_hosts: int
    address: str
    port: int
    key: bytes
    listener: int
    launch_id: str
    launcher: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToLauncher:
    """From a watchdog to its launcher: all have met; or which host is lost, and why."""

    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromPeer:
    """Between the watchdogs of two hosts: this one is there.

    Attributes:
        name: The name of the host.
        end: It ends as it should.
        lost: The number of a host that is lost, with the name of that host, and why; None if none is.
    """

    name: str
    end: bool = False
    lost: int | None = None
    of: str = ""
    why: str = ""


class Heartbeats:
    """When something was heard of each of several hosts last. The time is an argument.

    Attributes:
        seconds: How long the ranks wait for each other.
        has_failed: A rank has failed.
    """

    def __init__(self, now: float) -> None:
        self.seconds = UNKNOWN_SECONDS
        self.has_failed = False
        self._heard: dict[int, float] = {}
        self._looked = now

    def note(self, number: int, now: float) -> None:
        """Note that something has come from a host."""
        self._heard[number] = now

    def forget(self, number: int) -> None:
        """Watch a host no longer."""
        self._heard.pop(number, None)

    def silent(self, now: float) -> dict[int, float]:
        """Return the hosts that are lost, and for how many seconds nothing has come from each."""
        pause, self._looked = now - self._looked, now
        if pause > _LONGEST_PAUSE:
            self._heard = {number: min(heard + pause, now) for number, heard in self._heard.items()}
        limit = self.seconds + _AFTER_RANKS_SECONDS
        if self.has_failed:
            limit = min(limit, _AFTER_FAILURE_SECONDS)
        return {number: now - heard for number, heard in self._heard.items() if now - heard > limit}


@dataclass(slots=True, eq=False)
class WatchedPeer:
    """The connection to the watchdog of another host."""

    connection: socket.socket
    number: int
    name: str = ""
    received: bytes = b""


class PeerWatchdog:
    """A watchdog among those of all hosts."""

    def __init__(self, launcher: socket.socket, settings: WatchSettings) -> None:
        self._launcher = launcher
        self._settings = settings
        self._host = settings.host
        self._beats = Heartbeats(time.monotonic())
        self._have_met = False
        self._meet_until = time.monotonic() + _MEET_SECONDS
        self._from_launcher = b""
        self._lost = ""
        self._has_ended = False
        self._kill_at = float("inf")
        self._loop = EventLoop()
        self._loop.register(launcher, self._hear_launcher)
        self._peers: dict[int, WatchedPeer] = {}
        self._strangers: dict[Client, float] = {}
        self._proofs = AcceptedProofs(settings.key)

    def run(self) -> None:
        """Watch until the launcher ends."""
        if self._settings.listener >= 0:
            listener = socket.socket(fileno=self._settings.listener)
            listener.setblocking(False)
            self._loop.register(listener, lambda: self._accept(listener))
        else:
            self._connect()
        beat = time.monotonic()
        while not self._has_ended:
            self._loop.run_once(max(0.0, min(beat, self._kill_at) - time.monotonic()))
            now = time.monotonic()
            if now >= beat:
                beat = now + BEAT_SECONDS
                self._beat(now)
            if now >= self._kill_at:
                self._kill()
                return
        self._tell(end=True)

    def _connect(self) -> None:
        """Connect to the watchdog of the first host."""
        address, port, key = self._settings.address, self._settings.port, self._settings.key
        why = ""
        while time.monotonic() < self._meet_until:
            try:
                connection = connect_to_any(address, port, _IDENTIFY_SECONDS)
                connection.settimeout(_IDENTIFY_SECONDS)
                if prove(connection, key, self._host):
                    self._add(WatchedPeer(connection, 0))
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

    def _add(self, peer: WatchedPeer) -> None:
        peer.connection.setblocking(False)
        self._peers[peer.number] = peer
        self._beats.note(peer.number, time.monotonic())
        self._loop.register(peer.connection, lambda: self._hear(peer))
        self._tell()
        if self._host or len(self._peers) == self._settings.num_hosts - 1:
            self._have_met = True
            self._report(ToLauncher())

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
        sender = self._proofs.sender(client)
        if sender is None:
            return
        if 0 < sender.rank < self._settings.num_hosts and sender.rank not in self._peers:
            self._forget(client)
            self._add(WatchedPeer(client.connection, sender.rank))
        else:
            self._drop(client)

    def _forget(self, client: Client) -> None:
        self._loop.unregister(client.connection)
        self._strangers.pop(client, None)

    def _drop(self, client: Client) -> None:
        self._forget(client)
        client.connection.close()

    def _hear(self, peer: WatchedPeer) -> None:
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
        self._beats.note(peer.number, time.monotonic())
        *lines, rest = (peer.received + piece).split(b"\n")
        peer.received = rest[:_LONGEST_LINE]
        for line in lines:
            self._handle(peer, line)

    def _handle(self, peer: WatchedPeer, line: bytes) -> None:
        try:
            message = decode_line(FromPeer, line)
        except ValueError:  # of a watchdog of another version
            return
        peer.name = message.name[:64]
        if message.end:
            self._remove(peer)
        elif message.lost is not None:
            self._lose(message.lost, message.why, message.of)

    def _remove(self, peer: WatchedPeer) -> None:
        if self._peers.pop(peer.number, None) is not None:
            self._beats.forget(peer.number)
            self._loop.unregister(peer.connection)
            peer.connection.close()

    def _beat(self, now: float) -> None:
        """Tell the others that this host is alive, and look for those that have told nothing."""
        for client, since in list(self._strangers.items()):
            if now - since > _IDENTIFY_SECONDS:
                self._drop(client)
        self._tell()
        for number, silence in self._beats.silent(now).items():
            peer = self._peers[number]
            self._remove(peer)
            self._lose(number, f"is lost: nothing was heard of it for {silence:.0f} s", peer.name)
        if not self._have_met and now > self._meet_until:
            absent = min(set(range(1, self._settings.num_hosts)) - set(self._peers))
            self._lose(absent, f"is lost: its watchdog did not connect within {_MEET_SECONDS:g} s")

    def _tell(self, **more: Any) -> None:  # noqa: ANN401 - fields of the message
        """Tell the other hosts that this one is there, and more."""
        line = encode_line(FromPeer(name=socket.gethostname(), **more)).encode() + b"\n"
        for peer in list(self._peers.values()):
            # A connection that is full has heard nothing for long, and is about to be lost.
            with contextlib.suppress(OSError):
                peer.connection.send(line)

    def _lose(self, number: int, why: str, name: str = "") -> None:
        """Tell the launcher, and the other hosts, that one is lost."""
        if self._lost:
            return
        self._kill_at = time.monotonic() + END_SECONDS
        text = f"host {number}{f' ({name})' if name else ''} {why}"
        self._report(ToLauncher(lost=text))
        self._tell(lost=number, why=why, of=name)
        self._lost = text

    def _report(self, message: ToLauncher) -> None:
        """Tell the launcher."""
        with contextlib.suppress(OSError):
            self._launcher.send(encode_line(message).encode() + b"\n")

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
            message = decode_line(Watching, line)
            self._beats.seconds = self._beats.seconds if message.seconds is None else message.seconds
            self._beats.has_failed |= message.failed
            self._has_ended |= message.end
            if message.restarts:
                self._kill_at = float("inf")

    def _kill(self) -> None:
        """Kill the ranks of this host and its launcher, which waits in compiled code."""
        sys.stderr.write(f"rankwise: {self._lost}; the launcher of this host did not end, and is killed\n")
        sys.stderr.flush()
        kill_launch(self._settings.launch_id)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._settings.launcher, signal.SIGKILL)


class TerminalWatchdog:
    """The watchdog of a host that a terminal has reached, and the parent of its launcher.

    Nothing in it blocks but the start of the launcher: it reads only as much as it can hand on.
    """

    def __init__(self) -> None:
        self._launcher: subprocess.Popen[bytes] | None = None
        self._connection, self._theirs = socket.socketpair()
        self._connection.setblocking(False)
        os.set_blocking(1, False)
        self._from_terminal, self._from_launcher = bytearray(), bytearray()
        self._to_terminal, self._to_launcher = bytearray(), bytearray()
        self._has_ended = False
        self._silent_from = time.monotonic() + _SILENT_SECONDS

    def run(self) -> None:
        """Run until the launcher has ended, and the terminal has read all that it has sent, or is gone."""
        beat = time.monotonic()
        while not self._has_ended or self._to_terminal:
            now = time.monotonic()
            if now >= self._silent_from:
                return
            if now >= beat:
                beat = now + BEAT_SECONDS
                if not self._to_terminal:  # else it hears of this host when it reads
                    self._to_terminal += serialize(Alive())
            ready = dict(poll(self._events(), min(beat, self._silent_from) - now))
            if 0 in ready and not self._hear_terminal():
                return
            if 1 in ready and not self._write(1, self._to_terminal):
                return
            if (events := ready.get(self._connection.fileno(), 0)) & WRITABLE:
                self._write(self._connection.fileno(), self._to_launcher)
            if events & ~WRITABLE:
                self._hear_launcher()

    def close(self) -> int:
        """Kill what is left, and return the exit status of the launcher."""
        status = 1
        if self._launcher is not None:
            if self._has_ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = self._launcher.wait(END_SECONDS)
            self._launcher.kill()
            self._launcher.wait()
        kill_descendants()
        return status

    def _events(self) -> dict[int, int]:
        """Return what to wait for: reading waits for what was read before to be written."""
        events = {0: READABLE}
        if self._to_terminal:
            events[1] = WRITABLE
        if self._launcher is not None and not self._has_ended:
            reads = READABLE if len(self._to_terminal) < _BACKLOG_BYTES else 0
            events[self._connection.fileno()] = reads | (WRITABLE if self._to_launcher else 0)
        return events

    def _hear_terminal(self) -> bool:
        """Read what the terminal has sent, and return whether it may send more."""
        try:
            piece = os.read(0, READ_BYTES)
        except OSError:
            return False
        if piece:
            self._silent_from = time.monotonic() + _SILENT_SECONDS
            self._from_terminal += piece
            for message in pop_messages(self._from_terminal):
                self._handle(message)
        return bool(piece)

    def _handle(self, message: Any) -> None:  # noqa: ANN401 - any message
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Deliver):
            if message.signum == signal.SIGTSTP:  # the terminal is about to stop, and says nothing meanwhile
                self._silent_from = float("inf")
            if self._launcher is not None:
                self._launcher.send_signal(message.signum)
        elif not isinstance(message, Alive):
            self._to_launcher += serialize(message)

    def _hear_launcher(self) -> None:
        try:
            piece = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # it was killed before it had read everything
            piece = b""
        self._has_ended = not piece
        self._from_launcher += piece
        size = whole_messages(self._from_launcher)  # the watchdog's own messages stand between whole ones
        self._to_terminal += self._from_launcher[:size]
        del self._from_launcher[:size]

    def _write(self, descriptor: int, unsent: bytearray) -> bool:
        """Write what fits, and return whether somebody may read it."""
        try:
            del unsent[: os.write(descriptor, unsent[:READ_BYTES])]
        except BlockingIOError:
            return True
        except OSError:
            unsent.clear()
            return False
        return True

    def _start(self, start: Start) -> None:
        try:
            os.chdir(start.folder)
        except OSError as error:
            text = (
                f"the working directory {start.folder!r} cannot be used there: {error.strerror}; ranks run in that of "
                "the launch: create it, or launch in one that all hosts have"
            )
            self._to_terminal += serialize(HostEnded(error=LaunchError(text)))
            self._has_ended = True
            return
        self._launcher = subprocess.Popen(  # noqa: S603 - this interpreter
            [*interpreter_command("hosts.launcher"), str(self._theirs.fileno())],
            env={**own_environ(), **start.environ},
            stdin=subprocess.DEVNULL,
            stdout=2,  # what others print there must not be taken for messages
            pass_fds=[self._theirs.fileno()],
        )
        self._theirs.close()
        self._to_launcher += serialize(start.job)  # before this, nothing is for the launcher


def version() -> str:
    """Return the version of rankwise; "" if it is a copy that was not installed."""
    try:
        return metadata.version("rankwise")
    except metadata.PackageNotFoundError:
        return ""


def python_version() -> str:
    """Return the version of Python, such as "3.12": functions and modules of another one cannot be used."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def main(search_path: Sequence[str]) -> None:  # noqa: ARG001 - of processes that import a script
    """Watch: among others, if the last argument is the descriptor of the connection to the launcher."""
    leave_to_ranks()
    if len(sys.argv) > 1:
        _watch_peers(socket.socket(fileno=int(sys.argv[-1])))
    else:
        _watch_for_terminal()


def _watch_peers(launcher: socket.socket) -> None:
    """Watch for the launcher, which sends the settings."""
    received = b""
    while not received.endswith(b"\n"):
        piece = launcher.recv(1)  # not more: the next line, which may have come already, is for the watchdog
        if not piece:
            return
        received += piece
    PeerWatchdog(launcher, decode_line(WatchSettings, received)).run()


def _watch_for_terminal() -> None:
    """Watch for the terminal, at the other end of standard input and output."""
    client, _, server, *_ = f"{own_environ().get(_CONNECTION, '')}   ".split(" ")
    hello = Hello(
        version=version(),
        folder=str(Path(__file__).parents[1]),
        hostname=socket.gethostname(),
        python=python_version(),
        client=client,
        server=server,
    )
    become_subreaper()
    # The terminal may have gone: the end of its connection is noticed below, and not by a signal.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.write(1, hello.line())
    watchdog = TerminalWatchdog()
    try:
        watchdog.run()
    finally:
        status = watchdog.close()
    os._exit(status if status >= 0 else 128 - status)
