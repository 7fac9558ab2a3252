"""Stop: a signal to one rank, or a time limit, ends the training loop at the same step on all ranks.

A signal handler only notes the signal. `agreed()` exchanges the notes, in a message of its own of two bytes per rank.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from types import FrameType, TracebackType
from typing import Any, Final, Self

from rankwise._arguments import as_integer, as_seconds, integer
from rankwise._collectives.groups import comm_of
from rankwise._environment.facts import read_int
from rankwise._launch.reported_steps import JOB_LIMIT, PROGRESS, report_stop
from rankwise._session.environ import process_variables
from rankwise.errors import InvalidArgumentError, shown

log = logging.getLogger(__name__)

# A scheduler signals all processes of a job, and a launcher among them forwards the signal: a rank gets it twice.
_SAME_REQUEST_SECONDS: Final = 2.0
# How long before the end of a job of Slurm its ranks stop; in a job of less than 20 minutes, a tenth of what is left.
_SLURM_SECONDS: Final = 120.0
_SLURM_FRACTION: Final = 0.1
# What a rank sends: 0, the number of a signal, or this.
_NOTE: Final = struct.Struct("<h")
_TIME_LIMIT: Final = JOB_LIMIT
# SIGTERM alone on Windows.
_SIGNALS: Final = tuple(one for one in signal.Signals if one.name in {"SIGTERM", "SIGUSR1", "SIGUSR2"})
_NOT_HANDLED: Final = {"SIGKILL", "SIGSTOP"}


class Stop:
    """An agreement of all ranks to stop: after a signal to any of them, or at a time limit.

    A signal handler only notes the signal, so that what runs goes on: a step, an evaluation, the compilation of a
    model, a checkpoint. The next `agreed()` of all ranks is true. The same signal again, more than two seconds later,
    does what it would do without this object: SIGTERM ends the program. A handler that the program had before is called
    too, at every signal. In forked processes, such as the workers of a `DataLoader`, SIGTERM has its effect, and other
    signals have none.

    A context manager; `close()` restores the handlers that were there before. Between the nodes of a scheduler a signal
    may reach a rank late, when the others have told it to stop: after `close()` it would end that rank, whose exit
    status is then 128 + N. So close it last, after the session, or not at all: the end of the program does.

    Args:
        every: In how many calls of `agreed()` the ranks agree once; the others return False at once. The same on all
            ranks.
        time_limit: Seconds from now until the ranks stop, infinity for none; the limit of the rank that comes to it
            first. By default, in a job of Slurm two minutes before SLURM_JOB_END_TIME, or at nine tenths of the time
            that is left if that is less than 20 minutes; in other jobs there is no limit.
        signals: The signals, by default SIGTERM, SIGUSR1 and SIGUSR2; () for none.

    Raises:
        InvalidArgumentError: An argument is not as above; or there are signals, and this is not the main thread, which
            alone can handle them.
        LauncherEnvironmentError: SLURM_JOB_END_TIME is not a whole number.

    Example:
        >>> import os, rankwise
        >>> with Stop() as stop:
        ...     for step in range(100):
        ...         if step == 3:
        ...             os.kill(os.getpid(), signal.SIGTERM)  # to any rank
        ...         if stop.agreed():
        ...             break
        >>> step, stop.reason
        (3, 'rank 0 received SIGTERM')
    """

    def __init__(
        self,
        *,
        every: int = 1,
        time_limit: float | None = None,
        signals: Iterable[int] = _SIGNALS,
    ) -> None:
        self._every = as_integer(every, "every")
        if self._every < 1:
            raise InvalidArgumentError(f"every={self._every} is below 1: the number of calls in which ranks agree once")
        seconds = _slurm_limit(process_variables()) if time_limit is None else as_seconds(time_limit, "time_limit")
        self._deadline = time.monotonic() + seconds
        self._has_own_limit = time_limit is not None
        self._calls = 0
        self._reason: str | None = None
        self._received: dict[int, float] = {}
        self._pid = os.getpid()
        self._closed = False
        numbers = _checked(signals)
        if numbers:
            _require_main_thread("Stop()", ", or passes signals=() for a time limit alone")
        # Before the first handler is set: a signal may come at once.
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, self._handle)

    @property
    def reason(self) -> str | None:
        """Why the ranks stop, the same text on all of them; None before they have agreed to."""
        return self._reason

    def agreed(self) -> bool:
        """Return whether all ranks stop here: the same answer on all of them, and true from then on.

        Collective over the session; Local once it has returned True, and in the calls that `every` leaves out. Each
        rank calls it equally often. A signal has its effect in the first agreement that its rank begins afterwards.

        Raises:
            MismatchError: Another rank calls another collective, or has called this one more or less often, or with
                another `every`.
            CollectiveError: A rank is dead, or did not call within the session's timeout.
            NotJoinedError: The world has more than one rank, and this process has not joined it.
        """
        if self._reason is not None:
            return True
        comm = comm_of(None)
        self._calls += 1
        if self._calls % self._every:
            return False
        with comm.call("Stop.agreed", {"every": self._every, "call": self._calls}) as call:
            notes = [_NOTE.unpack(note)[0] for note in call.all_gather(_NOTE.pack(self._note()))]
        first = next((rank for rank, note in enumerate(notes) if note), None)
        if first is None:
            return False
        self._reason = _reason(comm.ranks[first], notes[first])
        log.info("stopping: %s", self._reason)
        if notes[first] != _TIME_LIMIT or not self._has_own_limit:
            report_stop(process_variables().get(PROGRESS, ""), notes[first])
        return True

    def close(self) -> None:
        """Restore the handlers that were there before, unless other code has set its own since.

        Local.

        Raises:
            InvalidArgumentError: There are signals, and this is not the main thread.
        """
        if self._closed or os.getpid() != self._pid:
            return
        if self._before:
            _require_main_thread("Stop.close()", "")
        self._closed = True
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _note(self) -> int:
        """Return what this rank knows: the first signal that it got, the time limit, or 0."""
        if self._received:
            return next(iter(self._received))
        return _TIME_LIMIT if time.monotonic() >= self._deadline else 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if os.getpid() != self._pid:  # multiprocessing ends its workers by SIGTERM
            is_noted = number != signal.SIGTERM
        else:
            now = time.monotonic()
            is_noted = not self._closed and now - self._received.setdefault(number, now) <= _SAME_REQUEST_SECONDS
        if callable(before):
            if not (is_noted and before is signal.default_int_handler):  # which raises, at SIGINT
                before(number, frame)
        elif not is_noted and before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _checked(signals: Iterable[int]) -> list[signal.Signals]:
    try:
        return [_signal(number) for number in signals]
    except TypeError:
        raise InvalidArgumentError(f"signals={shown(signals)} are not signals, such as (signal.SIGTERM,)") from None


def _signal(value: int) -> signal.Signals:
    number = integer(value)
    if number not in signal.valid_signals() or signal.Signals(number).name in _NOT_HANDLED:
        raise InvalidArgumentError(f"signals: {shown(value)} is not a signal that a program can handle")
    return signal.Signals(number)


def _require_main_thread(what: str, otherwise: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise InvalidArgumentError(
            f"{what} is called in thread {threading.current_thread().name!r}, and only the main thread can set "
            f"handlers of signals: call it there{otherwise}"
        )


def _slurm_limit(environ: Mapping[str, str]) -> float:
    """Return the seconds until ranks stop before the end of their job of Slurm; infinity if that is not known."""
    end = read_int(environ, "SLURM_JOB_END_TIME")
    left = 0.0 if end is None else end.value - time.time()
    # A job that goes on after its end has got more time: how much, no variable says.
    return left - min(_SLURM_SECONDS, left * _SLURM_FRACTION) if left > 0 else float("inf")


def _reason(rank: int, note: int) -> str:
    return f"rank {rank} " + ("came to its time limit" if note == _TIME_LIMIT else f"received {_signal(note).name}")
