"""The launcher of a host that a terminal has reached: the ordinary one, whose console and store are the terminal's."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

from rankwise._launch.forkserver.ipc import receive_message
from rankwise._launch.hosts.relay import HostConsole, TerminalLink
from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.options import Options
from rankwise._launch.other_hosts.messages import HostEnded
from rankwise._launch.reaper import set_parent_death_signal
from rankwise._launch.scripts import Terminated, terminated_by_signals
from rankwise._rendezvous.nodes import Nodes
from rankwise.errors import RankFailedError, RankwiseError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

# How long the terminal may read nothing before the rest of the output is discarded.
_SECONDS_TO_READ: Final = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJob:
    """A launch, as each host runs it.

    Attributes:
        options: Its options. The `nodes` are those of the terminal, which also shows what `output` shows.
        run: Runs it on one host: with a console, and the arguments `rendezvous` and `ranks` of `run_on_this_host`.
    """

    options: Options
    run: Callable[..., object]

    @property
    def nodes(self) -> Nodes:
        """The hosts."""
        return cast("Nodes", self.options.nodes)  # never None, as said above


def main(search_path: Sequence[str]) -> None:  # noqa: ARG001 - of processes that import a script
    """Launch. The last argument is the descriptor of the connection to the watchdog, which sends the job first."""
    set_parent_death_signal()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a terminal in the background may have ignored it
    connection = socket.socket(fileno=int(sys.argv[-1]))
    connection.set_inheritable(False)
    try:
        job: HostJob = pickle.loads(receive_message(connection))
    except EOFError:  # the watchdog has ended
        os._exit(1)
    terminal = TerminalLink(connection)
    console = HostConsole(terminal, job.options.output, job.options.nproc)
    ended = _launch(job, console, terminal)
    terminal.send(replace(ended, lost=tuple(console.drain(_SECONDS_TO_READ))))
    terminal.writer.drain(_SECONDS_TO_READ)
    os._exit(0)  # a normal exit unloads torch, which takes long


def _launch(job: HostJob, console: HostConsole, terminal: TerminalLink) -> HostEnded:
    """Run the ranks, and return how they have ended."""

    def rendezvous() -> RendezvousHandler:
        from rankwise._launch.hosts.rendezvous import TerminalRendezvous  # noqa: PLC0415 - imports torch

        return TerminalRendezvous(terminal, job.nodes.run_id)

    ranks: dict[int, LaunchedRank] = {}
    try:
        with terminated_by_signals(job.options.signals):
            job.run(console, rendezvous=rendezvous, ranks=ranks)
    except RankwiseError as error:
        return _failed(error, ranks)
    except (KeyboardInterrupt, Terminated) as stop:
        before = stop.__cause__
        by = signal.Signals(stop.status - 128 if isinstance(stop, Terminated) else signal.SIGINT)
        return HostEnded(error=before if isinstance(before, RankwiseError) else None, stopped=by.name)
    return HostEnded(values={number: rank.result.value for number, rank in ranks.items() if rank.result is not None})


def _failed(error: RankwiseError, ranks: dict[int, LaunchedRank]) -> HostEnded:
    first = ranks.get(error.failures[0].rank) if isinstance(error, RankFailedError) else None
    is_origin = first is not None and not first.was_stopped and not (first.result and first.result.consequence)
    cause = b"" if first is None or first.result is None else first.result.error
    return HostEnded(error=error, cause=cause, is_origin=is_origin)
