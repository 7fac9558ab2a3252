"""The messages of a launcher that waits for other hosts: which have joined, and what to run on the others."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Final

from rankwise._rendezvous.nodes import Nodes
from rankwise._text import ranks_text

# Hosts that are started together have met by then.
_SILENT_SECONDS: Final = 5.0
_NODE_RANK: Final = re.compile(r"--node[-_]rank(=.*)?")


class WaitingReport:
    """The report of one launcher."""

    def __init__(
        self, tell: Callable[[str], None], nodes: Nodes, command: Sequence[str], *, needs_secret: bool
    ) -> None:
        """Prepare.

        Args:
            tell: Shows a message to the user.
            nodes: The hosts.
            command: The command of this launcher; () in a program, which the user knows.
            needs_secret: The others need the secret that is in the environment of this launcher.
        """
        self._tell = tell
        self._nodes = nodes
        self._command = command
        self._secret = ", with the same RANKWISE_SECRET" if needs_secret else ""
        self._since = time.monotonic()
        self._told = ""

    def begin(self) -> None:
        """Note that this launcher begins to wait."""
        self._since = time.monotonic()
        self._told = ""

    def show_first(self, address: str) -> None:
        """Tell that the first host was not found yet, after some seconds, once."""
        self._show(f"host 0 was not found at {address} yet. {self._to_run('on host 0', 0)}")

    def show_endpoint(self, address: str) -> None:
        """Tell that nothing answers at the endpoint yet, after some seconds, once."""
        self._show(f"no launcher was found at {address} yet. {self._to_run('on that host')}")

    def show_numbered(self, names: dict[int, str]) -> None:
        """Tell which numbered hosts have joined, after some seconds, and whenever that changes.

        Args:
            names: The names of those that have, by their numbers.
        """
        absent = [number for number in range(self._nodes.num_nodes) if number not in names]
        if absent:
            here = ", ".join(f"{number} ({names[number]})" for number in sorted(names))
            missing = ranks_text(absent).replace("rank", "host")
            self._show(
                f"{self._count(len(names))}: {here}; missing: {missing}. "
                + self._to_run(
                    f"on host {absent[0]}{', and likewise on the others' if len(absent) > 1 else ''}", absent[0]
                )
            )

    def show_named(self, names: Sequence[str], *, is_spare: bool) -> None:
        """Tell which hosts have joined, likewise.

        Args:
            names: Their names.
            is_spare: This one is beyond the number of hosts.
        """
        if is_spare:
            self._show(f"{self._count(len(names))}: {', '.join(names)}; this one waits as a spare")
        else:
            self._show(f"{self._count(len(names))}: {', '.join(names)}. {self._to_run('on another host')}")

    def _show(self, text: str) -> None:
        if text != self._told and time.monotonic() - self._since >= _SILENT_SECONDS:
            self._told = text
            self._tell(f"rankwise: {text}")

    def _count(self, number: int) -> str:
        least, most = self._nodes.min_nodes, self._nodes.num_nodes
        wanted = str(most) if least == most else f"{least} to {most}"
        return f"{number} of {wanted} hosts {'has' if number == 1 else 'have'} joined"

    def _to_run(self, where: str, number: int | None = None) -> str:
        """Return what to run elsewhere, where the host has this number."""
        if not self._command:
            which = "" if number is None else f", with node_rank={number}"
            return f"Make the same call {where}{which}{self._secret}"
        words = self._command if number is None else _with_node_rank(self._command, number)
        return f"Run {where}{self._secret}: {shlex.join(words)}"


def _with_node_rank(command: Sequence[str], number: int) -> list[str]:
    """Return a command with another --node-rank, in the place of its own, or before the other options."""
    words: list[str] = []
    place = 3 if command[1:2] == ("-m",) else 2  # after `rankwise launch`, or `python -m MODULE`
    is_value = False
    for word in command:
        found = _NODE_RANK.fullmatch(word)
        if found:
            place = len(words)
        elif not is_value:
            words.append(word)
        is_value = found is not None and found[1] is None
    return [*words[:place], f"--node-rank={number}", *words[place:]]
