"""The other hosts of an attempt, as a watchdog sees them: the part in the launcher."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Final

from torch.distributed import Store

from rankwise._launch.interpreter import interpreter_command
from rankwise._launch.other_hosts.messages import Watching
from rankwise._launch.other_hosts.watchdog import ToLauncher, WatchSettings
from rankwise._net.acceptor import listen
from rankwise._net.addresses import is_loopback
from rankwise._net.job_secret import JobSecret
from rankwise._net.json_lines import decode_line, encode_line
from rankwise._net.rank_proof import connection_key
from rankwise._rendezvous.store import wait_for
from rankwise.errors import printable

_KEY: Final = "watchdog"
_KEY_BYTES: Final = 16
_MEET_SECONDS: Final = 30.0
_END_SECONDS: Final = 2.0
_RELAY_SECONDS: Final = 0.2
_VERDICT_SECONDS: Final = 3.0


class WatchedHosts:
    """The other hosts, for one attempt."""

    def __init__(self, timeout: Callable[[], float | None]) -> None:
        """Tell what watches the hosts how long the ranks wait for each other.

        Args:
            timeout: Returns that; None while it is not known.
        """
        self._timeout = timeout
        self._over = threading.Event()
        # A thread: the main one may wait in compiled code for a store that does not answer.
        self._relay = threading.Thread(target=self._send_timeouts, daemon=True, name="rankwise-host-timeouts")
        self._relay.start()

    @property
    def lost(self) -> str:
        """Which host is lost, and why; "" if none is."""
        raise NotImplementedError

    def wait_until_met(self) -> None:
        """Wait until a host cannot be lost unnoticed any more, or one is lost."""

    def wait_for_verdict(self) -> None:
        """Wait for some seconds for the reason why the store of another host has failed."""
        deadline = time.monotonic() + _VERDICT_SECONDS
        while not self.lost and time.monotonic() < deadline:
            time.sleep(_RELAY_SECONDS)

    def note_failure(self) -> None:
        """Tell that a rank has failed: a host of which nothing is heard is lost sooner."""
        self._send(Watching(failed=True))

    def spare_launcher(self) -> None:
        """Tell that the launcher runs on, without the host that is lost."""

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()
        self._relay.join(_END_SECONDS)  # it reads memory that is released afterwards

    def _send(self, message: Watching) -> None:
        raise NotImplementedError

    def _send_timeouts(self) -> None:
        sent: float | None = None
        while not self._over.wait(_RELAY_SECONDS):
            seconds = self._timeout()
            if seconds is not None and seconds != sent:
                sent = seconds
                self._send(Watching(seconds=seconds))


class HostsOfWatchdog(WatchedHosts):
    """The other hosts of a launch that was started on each: the watchdog of this one watches them."""

    def __init__(
        self,
        store: Store,
        *,
        host: int,
        num_hosts: int,
        address: str,
        secret: JobSecret | None,
        launch_id: str,
        timeout: Callable[[], float | None],
    ) -> None:
        """Start the watchdog.

        Args:
            store: The store of the launchers, for this attempt.
            host: The number of this host; that of the first one serves the others.
            num_hosts: The number of hosts.
            address: The address of the first host.
            secret: The secret of the job; None without one.
            launch_id: The id of this launch, by which its processes are found.
            timeout: Returns how long the ranks wait for each other; None while that is not known.
        """
        self._lost = ""
        listener = listen(0, one_host=is_loopback(address)) if host == 0 else None
        port, key = _publish(store, listener) if listener is not None else _read(store)
        settings = WatchSettings(
            host=host,
            num_hosts=num_hosts,
            address=address,
            port=port,
            key=connection_key(secret, key),
            listener=-1 if listener is None else listener.fileno(),
            launch_id=launch_id,
            launcher=os.getpid(),
        )
        self._connection, theirs = socket.socketpair()
        passed = [theirs.fileno(), *([] if listener is None else [listener.fileno()])]
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter
            [*interpreter_command("other_hosts.watchdog"), str(theirs.fileno())],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        if listener is not None:
            listener.close()
        self._write(encode_line(settings))
        self._has_reported = threading.Event()
        threading.Thread(target=self._listen, daemon=True, name="rankwise-watched-hosts").start()
        super().__init__(timeout)

    @property
    def lost(self) -> str:
        return self._lost

    def wait_until_met(self) -> None:
        """Wait until the watchdogs of all hosts have met; the watchdog itself decides how long that may take."""
        while not self._has_reported.wait(_RELAY_SECONDS):
            if self._process.poll() is not None:
                return

    def spare_launcher(self) -> None:
        self._send(Watching(restarts=True))

    def close(self) -> None:
        """End the watchdog, which tells the others that this host ends as it should."""
        super().close()
        self._send(Watching(end=True))
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()

    def _send(self, message: Watching) -> None:
        self._write(encode_line(message))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(line.encode() + b"\n")

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("r") as lines:
            for line in lines:
                self._lost = self._lost or decode_line(ToLauncher, line).lost
                self._has_reported.set()


def _publish(store: Store, listener: socket.socket) -> tuple[int, bytes]:
    port, key = listener.getsockname()[1], secrets.token_bytes(_KEY_BYTES)
    store.set(_KEY, f"{port} {key.hex()}")
    return port, key


def _read(store: Store) -> tuple[int, bytes]:
    """Return the port and the key of the first host.

    Raises:
        RuntimeError: The first host has written none.
    """
    if not wait_for(store, [_KEY], timeout=_MEET_SECONDS):
        raise RuntimeError("the launcher of host 0 has not started its watchdog")
    text = printable(store.get(_KEY).decode(errors="replace"))
    try:
        port, key = text.split()
        return int(port), bytes.fromhex(key)
    except ValueError as error:
        raise RuntimeError(f"the address of the watchdog of host 0 is {text!r}") from error
