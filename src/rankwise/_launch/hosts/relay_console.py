"""The console of an agent: what ranks print is sent to the launcher, which shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from rankwise._launch.console import Console, RankOutput
from rankwise._launch.forkserver.ipc import serialize
from rankwise._launch.hosts.host_messages import Printed, Told
from rankwise._launch.log_files import LogFile, LogFolder
from rankwise._launch.output import Output
from rankwise._launch.stream_writer import StreamWriter


class Relay:
    """The connection of an agent to its launcher, in one direction: a thread writes, as for other streams."""

    def __init__(self, descriptor: int) -> None:
        """Prepare.

        Args:
            descriptor: A descriptor whose other end the launcher reads.
        """
        self.on_writable: Callable[[], None] = lambda: None
        self.writer = StreamWriter(descriptor, "the connection to the launcher", on_writable=self._call)

    def _call(self) -> None:
        self.on_writable()  # looked up now: it is set later

    def send(self, message: object) -> bool:
        """Send a message; return False if the launcher has gone."""
        return self.writer.write(serialize(message))


class RelayConsole(Console):
    """A console whose streams are those of the launcher, on another host."""

    def __init__(self, relay: Relay, output: Output, nproc: int) -> None:
        """Prepare.

        Args:
            relay: The connection to the launcher.
            output: Where output goes; prefixes, and which ranks are shown, are left to the launcher.
            nproc: The number of ranks on this host.
        """
        super().__init__(
            nproc=nproc, prefixed=False, logs=LogFolder(output.log_dir, redirects=output.redirects, tee=output.tee)
        )
        self._relay = relay
        relay.on_writable = self._call_on_writable

    def show_status(self, text: str, *, last: bool = False) -> None:
        """Show nothing: the launcher has a status of its own."""

    def print_message(self, text: str) -> None:
        """Send a message for the user."""
        self._relay.send(Told(text))

    def inheritable_descriptor(self, stream: TextIO | None) -> None:
        """Return None: no rank has the launcher's descriptors."""

    def open(
        self,
        rank: int,
        stream: TextIO | None,
        *,
        local_rank: int | None = None,
        log: LogFile | None = None,
        host: str = "",  # noqa: ARG002 - as in the base class
    ) -> RankOutput:
        """Return the sender of a rank's output."""
        if log is not None and not log.is_teed:
            return RankOutput(self, rank, log=log)
        writer = _RankWriter(self._relay, rank, rank if local_rank is None else local_rank, stream)
        return RankOutput(self, rank, writer=writer, log=log)


class _RankWriter:
    """Sends the output of one rank on one stream."""

    def __init__(self, relay: Relay, rank: int, local_rank: int, stream: TextIO | None) -> None:
        self._relay = relay
        self._rank = rank
        self._local_rank = local_rank
        self._is_error = stream is not None and stream.fileno() == 2  # standard error

    @property
    def is_full(self) -> bool:
        return self._relay.writer.is_full

    def write(self, text: bytes) -> bool:
        return self._relay.send(
            Printed(rank=self._rank, local_rank=self._local_rank, is_error=self._is_error, text=text)
        )

    def wait(self, seconds: float) -> None:
        self._relay.writer.wait(seconds)

    def drain(self, seconds: float) -> str:
        self.wait(seconds)
        return ""
