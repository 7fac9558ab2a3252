"""The stacks of ranks, taken by their launcher: when it is asked for them (Ctrl-\\), and before it kills them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rankwise._launch.rank_process import RankProcess
from rankwise._net.polling import EventLoop
from rankwise._text import ranks_text

# The folder for files of reports, of the launcher and of its ranks.
HANG_DIR: Final = "RANKWISE_HANG_DIR"
# How long it may take to read the stacks of all ranks: when it is asked for them, and while other work waits.
_ASKED_SECONDS: Final = 5.0
_SHORT_SECONDS: Final = 1.0


class RankStacks:
    """The stacks of the ranks of one launcher.

    Attributes:
        kept: The lines of the report on ranks that were about to be killed; "" if none was.
        folder: The folder for files of such reports; "" for none.
    """

    def __init__(
        self, ranks: Mapping[int, RankProcess], loop: EventLoop, print_message: Callable[[str], None], folder: str
    ) -> None:
        self.kept = ""
        self.folder = folder
        self._ranks = ranks
        self._loop = loop
        self._print_message = print_message
        # A handler of signals writes, and the loop reads: the handler may have interrupted a message.
        self._requested, self._request = os.pipe()
        os.set_blocking(self._request, False)
        loop.register(self._requested, self._show)

    def request(self) -> None:
        """Let the loop print the stacks of all ranks: for a handler of signals."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._request, b".")

    def keep(self, numbers: Sequence[int]) -> None:
        """Take the stacks of ranks that are about to be killed, unless that was done."""
        if self.kept or not numbers:
            return
        if report := self._report(numbers, _SHORT_SECONDS, kind="killed"):  # else they have ended meanwhile
            self.kept = f"\nstacks of {ranks_text(numbers)} before the end:\n{report}"

    def imports(self) -> str:
        """Return what ranks import: "ranks 0-1: model.py:3"; "" if one of them does something else."""
        from rankwise._diagnose.sampling import sample_in_time  # noqa: PLC0415 - as below

        running = {number: rank.pid for number, rank in self._ranks.items() if rank.is_running and rank.pid}
        ranks: dict[str, list[int]] = {}
        for sample in sample_in_time(running, _SHORT_SECONDS):
            stack = sample.process.stack
            ranks.setdefault("" if stack is None else stack.importing, []).append(sample.rank)
        return "" if "" in ranks else " · ".join(f"{ranks_text(numbers)}: {site}" for site, numbers in ranks.items())

    def close(self) -> None:
        """Take no more requests."""
        self._loop.unregister(self._requested)
        os.close(self._requested)
        os.close(self._request)

    def _show(self) -> None:
        os.read(self._requested, 1 << 10)
        running = [number for number, rank in self._ranks.items() if rank.is_running and rank.pid]
        if not running:
            self._print_message("rankwise: no rank of this launcher is running now")
            return
        text = f"rankwise: stacks of {ranks_text(running)} on {socket.gethostname()}:\n"
        self._print_message(text + (self._report(running, _ASKED_SECONDS, kind="stacks") or "they have ended"))

    def _report(self, numbers: Sequence[int], seconds: float, *, kind: str) -> str:
        # Here, since most launches end without them.
        from rankwise._diagnose.folding import details, summary  # noqa: PLC0415
        from rankwise._diagnose.report_file import write_report  # noqa: PLC0415
        from rankwise._diagnose.sampling import sample_in_time  # noqa: PLC0415

        samples = sample_in_time({number: self._ranks[number].pid for number in numbers}, seconds)
        if not samples:
            return ""
        text = f"{summary(samples)}\n{details(samples)}"
        return f"{text}\n{write_report(self.folder, text, min(numbers), kind=kind)}" if self.folder else text
