"""The report of failed ranks: the cause first, with its traceback, and its consequences in one line each."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, NoReturn

from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.oom import POSSIBLE_OOM
from rankwise._pickling import loads
from rankwise._text import ranks_text
from rankwise.errors import LaunchError, RankFailedError, RankFailure, shortened

_SIGNAL_CAUSES: Final = {
    signal.SIGKILL: POSSIBLE_OOM,
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGABRT: "a check failed in compiled code, or the watchdog of NCCL ended it",
    signal.SIGBUS: "out of shared memory?",
}
# The report should fit on a screen; `RankFailure` has the whole traceback.
_LONGEST_TRACEBACK: Final = 8_000


class EarlierAttempts(NamedTuple):
    """The attempts before the last one: their failures, and the lines of the report about them."""

    failures: Sequence[Sequence[RankFailure]] = ()
    text: str = ""


def raise_failures(
    ranks: Mapping[int, LaunchedRank],
    world_size: int,
    *,
    returning: bool = False,
    oom_text: str = "",
    attempts: EarlierAttempts,
    consequences: Sequence[RankFailure] = (),
) -> None:
    """Raise an error if any rank has failed.

    Args:
        ranks: The ranks, which have ended.
        world_size: The number of ranks on all hosts.
        returning: A rank that ended without a return value has failed too.
        oom_text: The explanation of SIGKILL by the kernel's counters; "" if there is none.
        attempts: The attempts before this one.
        consequences: The failures on other hosts, which followed those of these ranks.

    Raises:
        RankFailedError: A rank has failed. Its cause is the exception of the first one, if that could be pickled.
    """
    failures = failures_of(ranks, returning=returning)
    if not failures:
        return
    failures += consequences
    first = ranks[failures[0].rank].result
    cause: BaseException | None = None
    if first is not None and first.error:
        with contextlib.suppress(Exception):  # only that rank may know its class; its text is in the report
            cause = loads(first.error, on_cpu=True)
    text = describe_failures(failures, world_size, oom_text=oom_text)
    if first is not None and first.consequence:
        text += _ended_before(ranks, first.time_ns)
    if lingering := [number for number, rank in ranks.items() if rank.lingers]:
        text += f"\n{ranks_text(sorted(lingering))} did not end after that: a thread or an atexit function still ran"
    raise RankFailedError(text + attempts.text, failures=failures, earlier=attempts.failures) from cause


def raise_lost(lost: str, ranks: Mapping[int, LaunchedRank], world_size: int, *, attempts: EarlierAttempts) -> NoReturn:
    """Raise the error that another host was lost, with the errors that ranks have raised themselves before.

    Raises:
        RankFailedError: A rank has failed, and not only been stopped.
        LaunchError: No rank has failed.
    """
    failures = [failure for failure in failures_of(ranks) if not failure.stopped]
    text = f"{lost}; the ranks of this host were ended"
    if not failures:
        raise LaunchError(text + attempts.text)
    text = f"{text}\n{describe_failures(failures, world_size)}"
    raise RankFailedError(text + attempts.text, failures=failures, earlier=attempts.failures)


def failed_before(ranks: Mapping[int, LaunchedRank], time_ns: int) -> dict[int, LaunchedRank]:
    """Return the ranks that had failed before they were stopped, or raised an error of their own while they stopped."""
    return {number: rank for number, rank in ranks.items() if _failed_before(rank, time_ns)}


def _failed_before(rank: LaunchedRank, time_ns: int) -> bool:
    if rank.result is None:
        return rank.has_failed and rank.ended_ns < time_ns
    if not rank.result.status:
        return False
    # Most interrupted ranks raise KeyboardInterrupt; the others raise an error because those have left. Neither counts.
    raised = rank.result.status > 0 and rank.result.failure and not rank.result.consequence
    return rank.result.time_ns < time_ns or bool(raised)


def failures_of(ranks: Mapping[int, LaunchedRank], *, returning: bool = False) -> list[RankFailure]:
    """Return the failures of ranks: causes before consequences, and each of them in the order of time."""
    failed = [
        number
        for number, rank in ranks.items()
        if rank.has_failed or (returning and (rank.result is None or not rank.result.value))
    ]
    return [_failure(number, ranks[number]) for number in sorted(failed, key=lambda number: _sort_key(ranks[number]))]


def describe_failures(failures: Sequence[RankFailure], world_size: int, *, oom_text: str = "") -> str:
    """Return the text of the report.

    Args:
        failures: The failures, in the order of time.
        world_size: The number of ranks on all hosts.
        oom_text: The explanation of SIGKILL by the kernel's counters; "" if there is none.
    """
    first, *later = failures
    text = f"rank {first.rank} of {world_size} on {first.host} {describe_end(first, oom_text)}"
    if first.traceback:
        text += f"\n\n{shortened(first.traceback.rstrip(), _LONGEST_TRACEBACK)}\n"
    endings: dict[str, list[RankFailure]] = {}
    for failure in later:
        endings.setdefault(_end_without_message(failure, oom_text), []).append(failure)
    for kind, alike in endings.items():
        details = {describe_end(failure, oom_text) for failure in alike}
        how = details.pop() if len(details) == 1 else kind  # messages may contain the rank, or a port
        if kind.startswith("raised ") and how == describe_end(first, oom_text):
            how = kind.replace("raised ", "raised the same ", 1)
        if len(alike) > 1 and how.startswith("was "):
            how = f"were {how.removeprefix('was ')}"
        text += f"\n{ranks_text(sorted(failure.rank for failure in alike))} then {how}"
    return text


def _ended_before(ranks: Mapping[int, LaunchedRank], time_ns: int) -> str:
    """Return a line with the ranks that ended without an error before another rank failed because of that."""
    ended_early = [number for number, rank in ranks.items() if rank.exitcode == 0 and _ended_ns(rank) < time_ns]
    return f"\n{ranks_text(sorted(ended_early))} had ended before that, with exit code 0" if ended_early else ""


def exit_status(failure: RankFailure) -> int:
    """Return the exit status of a launcher for its first failure, by the convention of shells."""
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _sort_key(rank: LaunchedRank) -> tuple[bool, int]:
    """Return the sort key: causes before consequences, then by time."""
    if rank.result is not None and rank.result.status:
        return rank.result.consequence, _ended_ns(rank)
    return rank.was_stopped, _ended_ns(rank)


def _ended_ns(rank: LaunchedRank) -> int:
    """Return when a rank ended: its target, if the result was received, else its process."""
    return rank.ended_ns if rank.result is None else rank.result.time_ns


def _failure(number: int, rank: LaunchedRank) -> RankFailure:
    exitcode = rank.exitcode or 0
    if rank.result is not None and rank.result.status and (-exitcode in rank.signals or rank.lingers):
        exitcode = rank.result.status  # it was stopped while it was ending by itself
    if rank.result is not None and rank.result.failure is not None:
        return replace(rank.result.failure, exitcode=exitcode, stopped=rank.was_stopped)
    crash = rank.crash.decode(errors="replace") if rank.has_crashed else ""
    return RankFailure(
        rank=number, host=socket.gethostname(), exitcode=exitcode, traceback=crash, stopped=rank.was_stopped
    )


def _end_without_message(failure: RankFailure, oom_text: str) -> str:
    """Return how a rank ended, without the message of the exception."""
    return describe_end(failure, oom_text).partition(":")[0] if failure.raised else describe_end(failure, oom_text)


def describe_end(failure: RankFailure, oom_text: str) -> str:
    """Return how a rank ended, as a predicate to follow its name: "raised KeyError: 'k'"."""
    exitcode = failure.exitcode
    if failure.lost or failure.stopped:
        return f"was lost: {failure.lost}" if failure.lost else f"was stopped ({signal.Signals(-exitcode).name})"
    if exitcode < 0 and -exitcode != signal.SIGINT:
        try:
            number = signal.Signals(-exitcode)
        except ValueError:
            return f"was killed by signal {-exitcode}"
        meaning = oom_text if oom_text and number == signal.SIGKILL else _SIGNAL_CAUSES.get(number)
        return f"was killed by {number.name}{f' ({meaning})' if meaning else ''}"
    if failure.raised:
        return f"raised {failure.raised}"
    if exitcode == 0:
        return "ended without returning (os._exit?)"
    return f"ended with exit code {exitcode}"
