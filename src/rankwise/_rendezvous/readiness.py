"""The last check before the process group opens, over the connections that the ranks met on.

Opening a process group waits in C++ for every rank: it hears no signal, and does not say who is missing. So rank zero
first hears from each rank that it can go on, and answers all; and while the ranks connect to each other after that, it
watches the connections for those that die. Under a launcher's agent there are none: the agent ends ranks itself.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rankwise._net.addresses import LOOPBACK
from rankwise._net.polling import wait_readable
from rankwise._text import ranks_on_hosts_text
from rankwise.errors import JoinError, JoinTimeoutError, printable

# Rank zero knows who is late: the others wait for its answer that much longer.
_ANSWER_SECONDS: Final = 5.0
_MOST_BYTES: Final = 65536
_READY: Final = "ready"


@dataclass(frozen=True, slots=True)
class Watch:
    """The connections between rank zero and the other ranks.

    Attributes:
        rank: This process's rank.
        lines: On rank zero the connection to each other rank, on the others that to rank zero; none under an agent.
    """

    rank: int
    lines: Mapping[int, socket.socket]

    def confirm(self, problem: str, *, timeout: float) -> None:
        """Wait until all ranks can go on.

        Collective over the world.

        Args:
            problem: Why this rank cannot, or "".
            timeout: Seconds that the other ranks may take.

        Raises:
            JoinError: A rank cannot go on, or has died.
            JoinTimeoutError: Some did not say so in time.
        """
        if not self.lines:
            if problem:
                raise JoinError(problem)
        elif self.rank == 0:
            try:
                self._hear_all(problem, timeout)
            except JoinError as error:
                self.tell(str(error))
                raise
            self.tell(_READY)
        else:
            self.tell(problem or _READY)
            answer = _read(self.lines[0], time.monotonic() + timeout + _ANSWER_SECONDS)
            if answer != _READY:
                raise JoinError(answer or _died(0))

    def lost(self, awaited: Sequence[int]) -> str:
        """Return why it is in vain to wait for these ranks, or "". Does not wait.

        On rank zero: which of them have died. On the others: what rank zero said before it gave up, or that it died.
        """
        for rank, line in self.lines.items():
            if (rank in awaited or self.rank != 0) and wait_readable({rank: line}, 0):
                return _text(_peek(line)) or _died(rank)
        return ""

    def tell(self, text: str) -> None:
        """Send a text to whoever is at the other ends."""
        for line in self.lines.values():
            with contextlib.suppress(OSError):  # it has died, and others are to hear of that
                line.sendall(text.replace("\n", "\t").encode()[: _MOST_BYTES - 1] + b"\n")

    def _addresses(self) -> dict[int, str]:
        return {rank: _address(line) for rank, line in self.lines.items()}

    def _hear_all(self, problem: str, timeout: float) -> None:
        problems = [f"rank 0: {problem}"] if problem else []
        deadline = time.monotonic() + (_ANSWER_SECONDS if problem else timeout)
        awaited = dict(self.lines)
        while awaited:
            remaining = deadline - time.monotonic()
            if remaining <= 0 and problems:
                break
            if remaining <= 0:
                late = ranks_on_hosts_text(
                        sorted(awaited), self._addresses()
                    )
                raise JoinTimeoutError(f"{late} met the others, but took no device within {timeout:g} s")
            for rank in wait_readable(awaited, remaining):
                said = _read(awaited.pop(rank), deadline)
                if said != _READY:
                    problems.append(f"rank {rank}: {said}" if said else _died(rank))
                    # The others are still on their way to the store, which goes with this process.
                    deadline = min(deadline, time.monotonic() + _ANSWER_SECONDS)
        if problems:
            raise JoinError("; ".join(problems))


def _address(line: socket.socket) -> str:
    """Return where the other side is; "" if that is this host, or it has hung up."""
    with contextlib.suppress(OSError):
        address = str(line.getpeername()[0])
        return "" if address in {line.getsockname()[0], LOOPBACK} else address
    return ""


def _died(rank: int) -> str:
    return f"rank {rank} met the others, but died before all had joined: its connection closed"


def _read(line: socket.socket, deadline: float) -> str:
    """Return the next text; "" if the other side has died.

    Raises:
        JoinTimeoutError: It did not come in time.
    """
    received = bytearray()
    while not received.endswith(b"\n"):
        line.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            piece = line.recv(_MOST_BYTES)
        except TimeoutError as error:
            raise JoinTimeoutError("rank zero did not answer in time, after all had met") from error
        except OSError:
            return ""
        finally:
            line.settimeout(None)
        if not piece:
            return ""
        received += piece
    return _text(received)


def _peek(line: socket.socket) -> bytes:
    """Return what has come, and leave it there: whoever waits asks again and again."""
    try:
        return line.recv(_MOST_BYTES, socket.MSG_PEEK)
    except OSError:
        return b""


def _text(received: bytes | bytearray) -> str:
    return printable(received.decode(errors="replace").strip())
