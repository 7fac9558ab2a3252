"""The barrier before the process group opens, and the wait for the group, over the connections of the handshake.

Opening a process group waits in C++ for every rank: it cannot be interrupted by a signal, and its error does not name
the missing ranks. So each rank first reports to rank zero whether it can go on, and rank zero replies to all. While the
ranks then connect to each other, a thread does so, and the connections are monitored for ranks that die. Under a
launcher's agent there are no such connections: the agent stops the other ranks itself.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from rankwise._net.addresses import LOOPBACK
from rankwise._net.polling import EventLoop, wait_readable
from rankwise._rendezvous.handshake import REPLY_SECONDS
from rankwise._text import ranks_on_hosts_text
from rankwise.errors import JoinError, JoinTimeoutError, printable

_MOST_BYTES: Final = 65536
_READY: Final = "ready"
_POLL_SECONDS: Final = 0.2
# For an error of the call itself, which may come at the same time and says more.
_OWN_ERROR_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class RankMonitor:
    """Monitors the other ranks over the connections between rank zero and them.

    Attributes:
        rank: This process's rank.
        connections: On rank zero the connection to each other rank, on the others the one to rank zero; none under a
            launcher's agent.
    """

    rank: int
    connections: Mapping[int, socket.socket]

    def monitored_barrier(self, problem: str, *, timeout: float) -> None:
        """Wait until all ranks are ready; an error names those that are not, as torch's `monitored_barrier` does.

        Collective over the world.

        Args:
            problem: Why this rank is not ready; "" if it is.
            timeout: Seconds to wait for the other ranks.

        Raises:
            JoinError: A rank is not ready, or has died.
            JoinTimeoutError: Some ranks did not report in time.
        """
        if not self.connections:
            if problem:
                raise JoinError(problem)
        elif self.rank == 0:
            try:
                self._receive_all(problem, timeout)
            except JoinError as error:
                self.send(str(error))
                raise
            self.send(_READY)
        else:
            self.send(problem or _READY)
            reply = _read(self.connections[0], time.monotonic() + timeout + REPLY_SECONDS)
            if reply != _READY:
                raise JoinError(reply or _died(0))

    def run(self, call: Callable[[], object]) -> None:
        """Run a call that waits for all ranks in C++, in a thread that is abandoned when one of them has died.

        Collective over the world.

        Raises:
            JoinError: Waiting cannot succeed.
            Exception: What the call has raised.
        """
        if not self.connections:
            call()
            return
        raised: list[Exception] = []

        def attempt() -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - raised again below, in the caller's thread
                raised.append(error)

        thread = threading.Thread(target=attempt, daemon=True, name="rankwise-open-group")
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if thread.is_alive() and (why := self.lost(self.connections)):
                thread.join(_OWN_ERROR_SECONDS)
                if thread.is_alive():
                    raise JoinError(why)
        if raised:
            raise raised[0]

    def lost(self, awaited: Iterable[int]) -> str:
        """Return why waiting for these ranks cannot succeed, or "". Does not wait.

        On rank zero: one of them has died. On the others: the message that rank zero sent before it gave up, or that
        rank zero has died.
        """
        of_interest = set(awaited) if self.rank == 0 else {0}
        watched = {rank: each for rank, each in self.connections.items() if rank in of_interest}
        for rank in wait_readable(watched, 0):
            return _text(_peek(watched[rank])) or _died(rank)
        return ""

    def send(self, text: str) -> None:
        """Send a text over every connection."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # the rank has died, but the others still need the text
                connection.sendall(text.replace("\n", "\t").encode()[: _MOST_BYTES - 1] + b"\n")

    def _addresses(self) -> dict[int, str]:
        return {rank: _address(connection) for rank, connection in self.connections.items()}

    def _receive_all(self, problem: str, timeout: float) -> None:
        """Receive the report of every other rank, on rank zero."""
        problems = [f"rank 0: {problem}"] if problem else []
        deadline = time.monotonic() + (REPLY_SECONDS if problem else timeout)
        awaited = dict(self.connections)

        def receive(rank: int) -> None:
            nonlocal deadline
            connection = awaited.pop(rank)
            loop.unregister(connection)
            text = _read(connection, deadline)
            if text != _READY:
                problems.append(f"rank {rank}: {text}" if text else _died(rank))
                # Other ranks may still be connecting to the store, which ends with this process.
                deadline = min(deadline, time.monotonic() + REPLY_SECONDS)

        with contextlib.closing(EventLoop()) as loop:  # of thousands of ranks, not all are looked at for each report
            for rank, connection in self.connections.items():
                loop.register(connection, partial(receive, rank))
            if not loop.run_until(lambda: not awaited, lambda: deadline) and not problems:
                late = ranks_on_hosts_text(sorted(awaited), self._addresses())
                raise JoinTimeoutError(f"{late} met the others, but did not select a device within {timeout:g} s")
        if problems:
            raise JoinError("; ".join(problems))


def _address(connection: socket.socket) -> str:
    """Return the address of the other side; "" if it is on this host, or has closed the connection."""
    with contextlib.suppress(OSError):
        address = str(connection.getpeername()[0])
        return "" if address in {connection.getsockname()[0], LOOPBACK} else address
    return ""


def _died(rank: int) -> str:
    return f"rank {rank} met the others, but died before all had joined: its connection closed"


def _read(connection: socket.socket, deadline: float) -> str:
    """Return the next line; "" if the other side has died.

    Raises:
        JoinTimeoutError: No complete line arrived in time.
    """
    received = bytearray()
    while not received.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            piece = connection.recv(_MOST_BYTES)
        except TimeoutError as error:
            raise JoinTimeoutError("rank zero did not reply in time, after all ranks had met") from error
        except OSError:
            return ""
        finally:
            connection.settimeout(None)
        if not piece:
            return ""
        received += piece
    return _text(received)


def _peek(connection: socket.socket) -> bytes:
    """Return the bytes that have arrived, and leave them in the connection: `lost()` is called repeatedly."""
    try:
        return connection.recv(_MOST_BYTES, socket.MSG_PEEK)
    except OSError:
        return b""


def _text(received: bytes | bytearray) -> str:
    return printable(received.decode(errors="replace").strip())
