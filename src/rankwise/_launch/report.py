"""How a failed world is told: the cause first, with its traceback, and its consequences in a line."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from rankwise._launch.launched_rank import RankProcess
from rankwise._pickling import loads
from rankwise._text import ranks_text
from rankwise.errors import RankFailedError, RankFailure, shortened

_MEANING: Final = {
    signal.SIGKILL: "out of memory?",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGABRT: "a check failed in compiled code",
    signal.SIGBUS: "out of shared memory?",
}
# The report is to fit on a screen; `RankFailure` has all of it.
_LONGEST_TRACEBACK: Final = 8_000


def raise_failures(ranks: Mapping[int, RankProcess], nproc: int, *, returning: bool = False, kernel: str = "") -> None:
    """Raise what became of the ranks, if any failed.

    Args:
        ranks: How they ended.
        nproc: How many there are.
        returning: A rank that ended without returning anything has failed too.
        kernel: What the kernel says of SIGKILL.

    Raises:
        RankFailedError: The first in time first; what it raised is the cause, if that could travel.
    """
    failures = failures_of(ranks, returning=returning)
    if not failures:
        return
    first = ranks[failures[0].rank].result
    cause: BaseException | None = None
    if first is not None and first.error:
        with contextlib.suppress(Exception):  # its class may be known on that rank alone; its text is there
            cause = loads(first.error)
    text = describe_failures(failures, nproc, kernel=kernel)
    if first is not None and first.consequence:
        text += _ended_before(ranks, first.time_ns)
    if lingering := [number for number, rank in ranks.items() if rank.lingers]:
        text += (
            f"\n{ranks_text(sorted(lingering))} did not end after that: a thread, or what runs at exit, was in the way"
        )
    raise RankFailedError(text, failures=failures) from cause


def failed_before(ranks: Mapping[int, RankProcess], time_ns: int) -> dict[int, RankProcess]:
    """Return those ranks that had failed when they were told to end, or raised an error while they did."""
    return {number: rank for number, rank in ranks.items() if _failed_before(rank, time_ns)}


def _failed_before(rank: RankProcess, time_ns: int) -> bool:
    if rank.result is None:
        return rank.has_failed and rank.ended_ns < time_ns
    if not rank.result.status:
        return False
    # What most ranks raise when they are interrupted is KeyboardInterrupt; others miss those that have ended of it.
    raised = rank.result.status > 0 and rank.result.traceback and not rank.result.consequence
    return rank.result.time_ns < time_ns or bool(raised)


def failures_of(ranks: Mapping[int, RankProcess], *, returning: bool = False) -> list[RankFailure]:
    """Return how those ranks ended that failed, causes before consequences, and then the first in time first."""
    failed = [
        number
        for number, rank in ranks.items()
        if rank.has_failed or (returning and (rank.result is None or not rank.result.value))
    ]
    return [_failure(number, ranks[number]) for number in sorted(failed, key=lambda number: _when(ranks[number]))]


def describe_failures(failures: Sequence[RankFailure], nproc: int, *, kernel: str = "") -> str:
    """Return what to tell of the ranks that failed, the first in time first."""
    first, *later = failures
    text = f"rank {first.rank} of {nproc} on {first.host} {describe_end(first, kernel)}"
    if first.traceback:
        text += f"\n\n{shortened(first.traceback.rstrip(), _LONGEST_TRACEBACK)}\n"
    endings: dict[str, list[RankFailure]] = {}
    for failure in later:
        endings.setdefault(_kind(failure, kernel), []).append(failure)
    for kind, alike in endings.items():
        details = {describe_end(failure, kernel) for failure in alike}
        how = details.pop() if len(details) == 1 else kind  # messages may differ in the rank, or in a port
        if len(alike) > 1 and how.startswith("was "):
            how = f"were {how.removeprefix('was ')}"
        text += f"\n{ranks_text(sorted(failure.rank for failure in alike))} then {how}"
    return text


def _ended_before(ranks: Mapping[int, RankProcess], time_ns: int) -> str:
    """Name those that ended without an error before another one missed them."""
    early = [number for number, rank in ranks.items() if rank.exitcode == 0 and _ended(rank) < time_ns]
    return f"\n{ranks_text(sorted(early))} had ended before that, with exit code 0" if early else ""


def exit_status(failure: RankFailure) -> int:
    """Return the exit status for a launcher whose first failed rank ended so, as shells count."""
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _when(rank: RankProcess) -> tuple[bool, int]:
    """Return what to sort by: causes before consequences, then by time."""
    if rank.result is not None and rank.result.status:
        return rank.result.consequence, _ended(rank)
    return rank.was_stopped, _ended(rank)


def _ended(rank: RankProcess) -> int:
    """Return when a rank ended: what it ran, if it could say so, else its process."""
    return rank.ended_ns if rank.result is None else rank.result.time_ns


def _failure(number: int, rank: RankProcess) -> RankFailure:
    raised = "" if rank.result is None else rank.result.raised
    traceback = "" if rank.result is None else rank.result.traceback
    exitcode = rank.exitcode or 0
    if rank.result is not None and rank.result.status and (-exitcode in rank.signals or rank.lingers):
        exitcode = rank.result.status  # it was told to end while it was ending by itself
    return RankFailure(
        rank=number,
        host=socket.gethostname(),
        exitcode=exitcode,
        raised=raised,
        traceback=traceback or (rank.crash.decode(errors="replace") if rank.has_crashed else ""),
        stopped=rank.was_stopped,
    )


def _kind(failure: RankFailure, kernel: str) -> str:
    """Return how a rank ended, without the message of what it raised."""
    return describe_end(failure, kernel).partition(":")[0] if failure.raised else describe_end(failure, kernel)


def describe_end(failure: RankFailure, kernel: str) -> str:
    """Return how a rank ended, as the rest of a sentence that begins with its name."""
    exitcode = failure.exitcode
    if failure.stopped:
        return f"was stopped ({signal.Signals(-exitcode).name})"
    if exitcode < 0 and -exitcode != signal.SIGINT:
        try:
            number = signal.Signals(-exitcode)
        except ValueError:
            return f"was killed by signal {-exitcode}"
        meaning = kernel if kernel and number == signal.SIGKILL else _MEANING.get(number)
        return f"was killed by {number.name}{f' ({meaning})' if meaning else ''}"
    if failure.raised:
        return f"raised {failure.raised}"
    if exitcode == 0:
        return "ended without returning (os._exit?)"
    return f"ended with exit code {exitcode}"
