"""The watch over hangs while a session is open: a process for the ranks of a host, started by the first of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rankwise._arguments import as_seconds
from rankwise._comm.control.links.connect import HostConnections
from rankwise._comm.control.page.layout import place_of_arrivals
from rankwise._environment.facts import LaunchEnvironment
from rankwise._rank_files import offer_stacks
from rankwise._session.environ import process_variables
from rankwise._torch import recorded_backends
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError

_SECONDS: Final = "RANKWISE_HANG_SECONDS"
_FOLDER: Final = "RANKWISE_HANG_DIR"
# The default of recent versions of torch.
_RECORDED: Final = 2000
_SILENT: Final = "its processes are stopped, or the host or the network is lost"
_PACKAGES: Final = str(Path(__file__).parents[2])


class HangWatch:
    """The watch of one session.

    Attributes:
        seconds: How long a collective waits before it is reported; 0 if there is no watch.
    """

    def __init__(self, argument: float | None, environ: Mapping[str, str] | None) -> None:
        """Read the settings.

        Raises:
            InvalidArgumentError: The argument is not a duration.
            LauncherEnvironmentError: The variable is not.
        """
        variables = process_variables() if environ is None else environ
        self.seconds = _seconds(variables.get(_SECONDS, "").strip() if argument is None else argument)
        self._folder = variables.get(_FOLDER, "")
        self._hosts: HostConnections | None = None
        self._withdraws: list[Callable[[], None]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()

    @property
    def on_hosts(self) -> Callable[[HostConnections], None] | None:
        """The function that takes the connections to other hosts; None without a watch."""
        return self._take if self.seconds and sys.platform == "linux" else None

    @property
    def recorded(self) -> int:
        """How many collectives torch should keep a record of; 0 to leave that to torch."""
        return _RECORDED if self.seconds else 0

    def _take(self, hosts: HostConnections) -> None:
        self._hosts = hosts

    def start(self, reading: LaunchEnvironment, *, backend: str | None, adopted: bool) -> None:
        """Begin to watch: the first rank of each host starts the process.

        Args:
            reading: The launch environment.
            backend: The backends of the process group, as torch writes them; None if there is no group.
            adopted: Other code has opened the process group, and may have used it.
        """
        if not self.seconds or reading.world_size.value == 1 or sys.platform != "linux":
            return
        rank, local_rank = reading.rank.value, reading.local_rank
        local = rank if local_rank is None else local_rank.value
        self._withdraws = [offer_stacks(rank=rank, world_size=reading.world_size.value, local_rank=local)]
        if {name.rpartition(":")[2] for name in (backend or "none").split(",")} <= recorded_backends():
            from rankwise._diagnose.flight_record import offer_calls  # noqa: PLC0415 - few sessions are watched
            from rankwise._session.call_record import CallRecord  # noqa: PLC0415 - likewise

            record = CallRecord(adopted=adopted)
            self._withdraws.append(offer_calls(record.calls, record.pending))
        if self._hosts is not None:
            local = self._hosts.neighbours_of(rank).index(rank)
        if local == 0:
            self._start_process(self._settings(reading))
        self._close_connections()

    def _settings(self, reading: LaunchEnvironment) -> dict[str, Any]:
        hosts, rank = self._hosts, reading.rank.value
        size = reading.world_size if reading.local_world_size is None else reading.local_world_size
        return {
            "parent": os.getpid(),
            "seconds": self.seconds,
            "folder": self._folder,
            "arrivals": place_of_arrivals(reading.world_size.value),
            "is_first": hosts is None or rank == 0 or not hosts.connections,
            "ranks_here": size.value if hosts is None else len(hosts.neighbours_of(rank)),
            "hosts": [] if hosts is None else _other_hosts(hosts, rank),
        }

    def _start_process(self, settings: dict[str, Any]) -> None:
        from rankwise._diagnose.jobs import WATCHER  # noqa: PLC0415 - few sessions are watched

        # Without the working folder, whose files may have the names of modules. The rank may have found rankwise by
        # `sys.path`.
        code = f"import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[2]]; from {WATCHER} import main; main()"
        connections = [each["descriptor"] for each in settings["hosts"] if each["descriptor"] >= 0]
        with contextlib.suppress(OSError):  # no process is left for it; the ranks can do without
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                [sys.executable, "-c", code, json.dumps(settings), _PACKAGES],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=connections,
                start_new_session=True,  # Ctrl-C is not meant for it
            )

    def _close_connections(self) -> None:
        """Close the connections to other hosts, which the process has."""
        hosts, self._hosts = self._hosts, None
        for connection in () if hosts is None else hosts.connections.values():
            connection.close()

    def stop(self) -> None:
        """End the watch."""
        if self._pid != os.getpid():
            return
        self._close_connections()
        while self._withdraws:
            self._withdraws.pop()()
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.kill()  # it has no state, and may be reading stacks
            process.stdin.close()
            process.wait()


def _other_hosts(hosts: HostConnections, rank: int) -> list[dict[str, Any]]:
    """Return the other hosts that the process of this rank's host exchanges its findings with, as its settings."""
    others = [first for first in hosts.neighbours if rank not in hosts.neighbours[first]]
    unwatched = f"no process watches it: {_SECONDS} is not set there"
    return [
        {
            "name": hosts.hosts[first],
            "ranks": list(hosts.neighbours[first]),
            "descriptor": hosts.connections[first].fileno() if first in hosts.connections else -1,
            "why_silent": _SILENT if first in hosts.connections else unwatched,
        }
        for first in (others if rank == 0 else hosts.connections)
    ]


def _seconds(value: object) -> float:
    if value in {"", 0}:
        return 0.0
    if not isinstance(value, str):
        return as_seconds(value, "hang_report", most=float(1 << 31))
    try:
        number = float(value)
        return number and as_seconds(number, _SECONDS, most=float(1 << 31))
    except (ValueError, InvalidArgumentError):
        raise LauncherEnvironmentError(
            f"{_SECONDS}={value!r} is not a number of seconds; 0, or no value, is for no reports of hangs"
        ) from None
