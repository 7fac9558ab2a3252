"""The output of the hosts of a launch, on the launcher's own streams: that of ranks, and messages."""

from __future__ import annotations

import sys

from rankwise._launch.console import Console, RankOutput
from rankwise._launch.hosts.host_messages import Printed


class HostOutput:
    """The output of all hosts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._outputs: dict[tuple[str, int, bool], RankOutput] = {}
        self._told: dict[str, set[str]] = {}
        self._text: dict[str, bytes] = {}

    @property
    def is_full(self) -> bool:
        """So much is not shown yet that nothing more should be read for now."""
        return any(output.is_full for output in self._outputs.values())

    def show(self, host: str, printed: Printed) -> None:
        """Show the output of a rank."""
        key = host, printed.rank, printed.is_error
        if key not in self._outputs:
            stream = sys.stderr if printed.is_error else sys.stdout
            self._outputs[key] = self._console.open(printed.rank, stream, local_rank=printed.local_rank, host=host)
        self._outputs[key].write(printed.text)

    def tell(self, host: str, text: str) -> None:
        """Show a message of an agent, unless that of another host has sent the same."""
        hosts = self._told.setdefault(text, set())
        if not hosts or host in hosts:  # its first, or the same event again
            hosts.clear()
            self._console.print_message(text)
        hosts.add(host)

    def show_text(self, host: str, text: bytes) -> None:
        """Show what a process that is no rank has printed on a host, by whole lines."""
        whole, newline, rest = (self._text.pop(host, b"") + text).rpartition(b"\n")
        if rest:
            self._text[host] = rest
        if newline:
            self._console.print_message(whole.decode(errors="replace"))

    def flush(self) -> None:
        """Show lines that are not whole yet, such as a prompt."""
        for output in self._outputs.values():
            output.flush()

    def end(self, host: str) -> None:
        """Show the rest of what a host has sent."""
        for key in [key for key in self._outputs if key[0] == host]:
            self._outputs.pop(key).flush(last=True)
        if rest := self._text.pop(host, b""):
            self._console.print_message(rest.decode(errors="replace"))
