"""How a failed world is told: the cause first, with its traceback, and its consequences in a line."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final

from rankwise.errors import RankFailure

# How a rank ends that was stopped because another one failed.
STOPPED: Final = -signal.SIGTERM

_MEANING: Final = {
    signal.SIGKILL: "out of memory?",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGABRT: "a check failed in compiled code",
    signal.SIGBUS: "out of shared memory?",
}


def describe(failures: Sequence[RankFailure], nproc: int) -> str:
    """Return what to tell of the ranks that failed, the first in time first."""
    first, *later = failures
    text = f"rank {first.rank} of {nproc} on {first.host} {_ending(first)}"
    if first.traceback:
        text += f"\n\n{first.traceback.rstrip()}\n"
    endings: dict[str, list[int]] = {}
    for failure in later:
        endings.setdefault(_ending(failure), []).append(failure.rank)
    for ending, ranks in endings.items():
        text += f"\n{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))} then {ending}"
    return text


def exit_status(failure: RankFailure) -> int:
    """Return the exit status for a launcher whose first failed rank ended so, as shells count."""
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _ending(failure: RankFailure) -> str:
    if failure.traceback:
        return "raised " + failure.traceback.rstrip().rpartition("\n")[2].partition(":")[0]
    exitcode = failure.exitcode
    if exitcode == 0:
        return "ended without returning (os._exit?)"
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    if exitcode == STOPPED:
        return "was stopped (SIGTERM)"
    try:
        number = signal.Signals(-exitcode)
    except ValueError:
        return f"was killed by signal {-exitcode}"
    meaning = _MEANING.get(number)
    return f"was killed by {number.name}{f' ({meaning})' if meaning else ''}"
