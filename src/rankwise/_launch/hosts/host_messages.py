"""The messages between a launcher and the agents that it has started on other hosts, over the streams of ssh.

The first line of a host is text, so that launchers and agents of different versions can tell. Then each side sends
values, as `forkserver.ipc` serializes them: the launcher to the guard of a host, which hands those for the agent on,
and the agent to the launcher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from rankwise._launch.output import Output
from rankwise._launch.preload import MainSource, Preload
from rankwise._launch.spec import LaunchSpec
from rankwise._net.json_lines import decode_line
from rankwise.errors import RankwiseError

# What shells print when they start comes before it.
HELLO_MARK: Final = b"rankwise-host "


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first line of a host.

    Attributes:
        version: The version of rankwise there.
        folder: Where that is installed.
        python: The version of Python there.
        hostname: The name that the host has for itself.
        client: The address of the launcher's host, as ssh there sees it; "" without ssh.
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
        return HELLO_MARK + json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> Hello:
        """Return the content of such a line.

        Raises:
            ValueError: It is one of another version.
        """
        return decode_line(cls, line.removeprefix(HELLO_MARK))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStart:
    """To the guard: start the agent.

    Attributes:
        environ: The variables of the agent, beside those of the host.
        folder: The working directory.
    """

    environ: Mapping[str, str] = field(repr=False)
    folder: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """To the guard: send the agent a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class Alive:
    """To the guard: the launcher is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJob:
    """To the agent, first: what to launch.

    Attributes:
        spec: The ranks; its environment is what they have beside that of the agent.
        preload: The modules that ranks inherit, as users name them.
        main: The program of ranks, where `preload` is about the caller's; None for that of the target.
        output: Where their output goes; what is shown, the launcher shows.
        signals: The signals that stop the ranks.
    """

    spec: LaunchSpec
    preload: Preload
    main: MainSource | None
    output: Output
    signals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """To the launcher: the agent waits for the next round of hosts."""


@dataclass(frozen=True, slots=True)
class Serve:
    """To the agent of the first host of a round: serve the store of the round.

    Attributes:
        one_host: All hosts of the round are this one.
    """

    one_host: bool


@dataclass(frozen=True, slots=True)
class Serving:
    """To the launcher: the store of the round is served on this port."""

    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """To the agents of a round: the hosts have met.

    Attributes:
        node_rank: The number of this host.
        num_nodes: The number of hosts.
        address, port: Those of the store.
    """

    node_rank: int
    num_nodes: int
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """To the launcher: a rank has printed.

    Attributes:
        rank, local_rank: The rank.
        is_error: On standard error.
        text: The output.
    """

    rank: int
    local_rank: int
    is_error: bool
    text: bytes


@dataclass(frozen=True, slots=True)
class Told:
    """To the launcher: a message of the agent for the user."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnded:
    """To the launcher, last: the ranks of the host have ended.

    Attributes:
        values: The results of the function, pickled, by rank.
        error: The error; None if there is none, or the agent was only stopped.
        stopped: The signal that has stopped the agent; "" if none has.
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
