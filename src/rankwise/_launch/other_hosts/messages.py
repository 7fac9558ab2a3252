"""The messages between the terminal that has launched, and each host, over the streams of ssh or srun.

The first line of a host is text, so that terminals and hosts of different versions can tell. Then each side sends
values, as `forkserver.ipc` serializes them. On the host the watchdog reads those of the terminal, and hands those for
the launcher on; it writes what the launcher sends, and adds its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rankwise._net.json_lines import decode_line, encode_line
from rankwise.errors import RankwiseError

# What shells print when they start comes before it.
HELLO_MARK: Final = b"rankwise-host "
# The operation of a request that is answered when the hosts of an attempt have met; others are those of the store.
MEET: Final = "meet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first line of a host.

    Attributes:
        version: The version of rankwise there.
        folder: Where that is installed.
        python: The version of Python there.
        hostname: The name that the host has for itself.
        client: The address of the terminal's host, as ssh there sees it; "" without ssh.
        server: The address of the host on that connection.
    """

    version: str
    folder: str
    hostname: str
    python: str = ""
    client: str = ""
    server: str = ""

    def line(self) -> bytes:
        """Return the line."""
        return HELLO_MARK + encode_line(self).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> Hello:
        """Return the content of such a line.

        Raises:
            ValueError: It is one of another version.
        """
        return decode_line(cls, line.removeprefix(HELLO_MARK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """To a watchdog: start the launcher.

    Attributes:
        environ: The variables of the launcher, beside those of the host.
        folder: The working directory.
        job: A pickled `launcher.HostJob`, for the launcher: the watchdog imports nothing of it.
    """

    environ: Mapping[str, str] = field(repr=False)
    folder: str
    job: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Deliver:
    """To a watchdog: send the launcher a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class Alive:
    """From a terminal, or a watchdog: it is there."""


@dataclass(frozen=True, slots=True)
class Request:
    """From a launcher: MEET, or an operation of the store."""

    number: int
    operation: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """To a launcher: the result of the request with the same number; that of MEET is a Meeting."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The hosts of an attempt, of which this one is `node_rank`, and the address of the first one for their ranks."""

    number: int  # of the meeting, from 1
    node_rank: int
    num_nodes: int
    address: str
    one_host: bool  # all of them are this one


@dataclass(frozen=True, slots=True)
class HostLost:
    """To a launcher: a host of this meeting is lost, and why."""

    meeting: int
    why: str


@dataclass(frozen=True, slots=True)
class Hold:
    """To a launcher: the terminal shows no more output for now, or again."""

    is_held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """From a launcher to what watches the hosts: how soon one is lost, and what becomes of this launcher."""

    seconds: float | None = None  # how long its ranks wait for others
    failed: bool = False  # a rank has
    restarts: bool = False  # it goes on without the host that is lost
    end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """From a launcher: a rank has printed."""

    rank: int
    local_rank: int
    is_error: bool  # on standard error
    text: bytes


@dataclass(frozen=True, slots=True)
class Told:
    """From a launcher: a message for the user."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnded:
    """From a launcher, last: the ranks of the host have ended.

    Attributes:
        values: The results of the function, pickled, by rank.
        error: The error; None if there is none, or the launcher was only stopped.
        stopped: The signal that has stopped the launcher; "" if none has.
        cause: The exception of the first rank that failed, pickled; b"" if it could not be.
        is_origin: The error has its cause on this host.
        lost: Messages about parts of log files that are lost.
    """

    values: Mapping[int, bytes] = field(default_factory=dict)
    error: RankwiseError | None = None
    stopped: str = ""
    cause: bytes = b""
    is_origin: bool = False
    lost: tuple[str, ...] = ()
