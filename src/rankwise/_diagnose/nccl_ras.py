"""The view that NCCL has of a job, by its RAS service (2.24 and newer), a thread of every process with a communicator.

The service listens on loopback, or at NCCL_RAS_ADDR, and answers in plain text. The answer is read as text of
strangers: bounded in time and size, and without control characters. No answer is no error.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rankwise._diagnose.jobs import Job
from rankwise._diagnose.processes import environ_of, uses_library
from rankwise._text import ranks_text

_ADDRESS: Final = "NCCL_RAS_ADDR"
_DEFAULT: Final = "localhost:28028"
_LIBRARY: Final = "libnccl"
# Of ncclras, NVIDIA's client.
_HELLO: Final = b"CLIENT PROTOCOL 2\n"
_ANSWER: Final = b"SERVER PROTOCOL "
# How long the service waits for other processes; it may take twice that time for all.
_TIMEOUT: Final = 2
_SECONDS: Final = 6.0
_MAX_BYTES: Final = 1 << 18
_MAX_LINES: Final = 40
_LONGEST_LINE: Final = 1024
# The sections of the answer that have the outliers, each with a line of "=" below its name.
_SECTIONS: Final = ("Errors", "Warnings")
_MISMATCH: Final = re.compile(r"Communicator ranks have different (\w+) operation counts")
# "26 ranks have launched up to operation 6650", and below it the ranks if they are few; or a line for a single rank.
_COUNT: Final = re.compile(
    r"(?:\d+ ranks have|Rank (?P<rank>\d{1,9}) has) (?:launched up to operation (?P<count>\d{1,18})|not launched any)"
)
_MEMBER: Final = re.compile(r"Rank (\d{1,9}) -- ")
_PROCESS: Final = re.compile(r"managed by process (\d{1,9} on node \S+)")
_BEHIND: Final = re.compile(r"The missing ranks?: (\d{1,9}(?:,\d{1,9})*)")
_OTHERS: Final = ""  # ranks that are counted, and not named
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True, slots=True)
class RasReport:
    """The answer of the service.

    Attributes:
        address: Where it was.
        lines: Its errors and warnings; empty if it has none.
        failure: Why there is none; "" if there is one.
    """

    address: str
    lines: Sequence[str] = ()
    failure: str = ""

    def __str__(self) -> str:
        if self.failure:
            return f"NCCL RAS at {self.address}: {self.failure}"
        if not self.lines:
            return f"NCCL RAS at {self.address}: no errors or warnings"
        shown = [*self.lines[:_MAX_LINES], *(["  ..."] if len(self.lines) > _MAX_LINES else [])]
        return "\n".join([f"NCCL RAS at {self.address}:", *(f"  {line}" for line in (*lagging(self.lines), *shown))])


def ras_report(job: Job) -> RasReport | None:
    """Ask the service of a job; None if the job does not use NCCL."""
    users = [rank.process.pid for rank in job.ranks if uses_library(rank.process.pid, _LIBRARY)]
    if not users:
        return None
    address = environ_of(users[0]).get(_ADDRESS, "") or _DEFAULT
    return ask(address, _SECONDS)


def ask(address: str, seconds: float) -> RasReport:
    """Ask the service at "host:port"; it has that many seconds."""
    host, _colon, port = address.rpartition(":")
    try:
        text = _status((host.strip("[]"), int(port)), time.monotonic() + seconds)
    except ConnectionRefusedError:
        return RasReport(
            address,
            failure="nothing listens there (NCCL before 2.24, NCCL_RAS_ENABLE=0, or the network of a container)",
        )
    except (OSError, ValueError, OverflowError) as error:
        return RasReport(address, failure=f"no answer: {_UNPRINTABLE.sub('?', str(error))}")
    return RasReport(address, _sections(text))


def _status(address: tuple[str, int], deadline: float) -> str:
    """Return the text of the service.

    Raises:
        OSError: It was not reached, or did not end its answer in time.
        ValueError: It is another service.
    """

    def rest() -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        return left

    with socket.create_connection(address, timeout=rest()) as connection:
        connection.sendall(_HELLO)
        if not _line(connection, rest).startswith(_ANSWER):
            raise ValueError("this is another service")
        connection.sendall(b"TIMEOUT %d\n" % _TIMEOUT)
        if _line(connection, rest).strip() != b"OK":
            raise ValueError("this is another service")
        connection.sendall(b"VERBOSE STATUS\n")
        data = b""
        while len(data) < _MAX_BYTES:
            connection.settimeout(rest())
            part = connection.recv(1 << 16)
            if not part:
                break
            data += part
    return data.decode("ascii", errors="replace")


def _line(connection: socket.socket, rest: Callable[[], float]) -> bytes:
    """Return the next line: no other follows it before the next command."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
        connection.settimeout(rest())
        part = connection.recv(_LONGEST_LINE)
        if not part:
            break
        data += part
    return data


def _sections(text: str) -> list[str]:
    """Return the lines of the errors and warnings, without their headings."""
    lines = [_UNPRINTABLE.sub("?", line) for line in text.splitlines()]
    starts = [
        index
        for index, line in enumerate(lines)
        if line in _SECTIONS and lines[index + 1 : index + 2] == ["=" * len(line)]
    ]
    if not starts:
        return []
    headings = {index for start in starts for index in (start, start + 1)}
    return [line for index, line in enumerate(lines) if index > starts[0] and index not in headings and line.strip()]


def lagging(lines: Iterable[str]) -> list[str]:
    """Return a line for each rank of a communicator that has started fewer operations, or does not answer."""
    found: list[str] = []
    operation, count, counts = "", -1, dict[str, int]()

    def close() -> None:
        most = max(counts.values(), default=0)
        found.extend(
            f"{name}: {started} of {most} {operation} operations started"
            for name, started in counts.items()
            if name is not _OTHERS and started < most
        )
        counts.clear()

    for line in map(str.strip, lines):
        if match := _MISMATCH.match(line):
            close()
            operation = match[1]
        elif match := _COUNT.match(line):
            count = int(match["count"] or 0)
            name = _name(match["rank"], line) if match["rank"] else _OTHERS
            counts[name] = max(count, counts.get(name, 0))
        elif (match := _MEMBER.match(line)) and counts:
            counts[_name(match[1], line)] = count
        elif match := _BEHIND.match(line):
            close()
            found.append(f"{ranks_text([int(rank) for rank in match[1].split(',')])}: no answer from NCCL there")
        else:
            close()
    close()
    return found


def _name(rank: str, line: str) -> str:
    process = _PROCESS.search(line)
    return f"rank {rank} of the communicator" + (f", process {process[1]}" if process else "")
