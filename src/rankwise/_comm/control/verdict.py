"""The verdict on one exchange of a group: the calls agree, they differ, or an error that all members raise. No I/O."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeAlias

from rankwise._comm.control.protocol import (
    Frame,
    FrameKind,
    WaitingInOtherGroup,
    mismatch_error,
    read_report,
    reported_error,
)
from rankwise.errors import CollectiveError, MismatchError, RankwiseError, summary

# Computes the result of a collective from the messages of all members, by group rank. Where one member computes it for
# all others, these get the result, or the error that it raised.
Combine: TypeAlias = Callable[[Sequence[bytes]], bytes]


class Outcome(IntEnum):
    """The outcome of an exchange."""

    AGREED = 0
    DIFFERENT = 1  # the digests differ: the members exchange details next
    ERROR = 2


_OUTCOMES: Final = tuple(Outcome)  # by value: a call of the class takes longer


@dataclass(slots=True)
class Verdict:
    """The verdict on one exchange, the same on all members.

    Attributes:
        outcome: The outcome.
        result: The result of `combine`, b"" without.
        error: The error that every member raises, if the outcome is one.
        waiting: The other groups in which members of this one wait, a deadlock.
        bodies: The bodies that this member has asked for, by group rank.
    """

    outcome: Outcome
    result: bytes = b""
    error: RankwiseError | None = None
    waiting: Sequence[WaitingInOtherGroup] = ()
    bodies: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        """It holds whatever the root has found: a member has failed, or is in a deadlock, and so has sent no call.

        Other errors end an exchange only if the root has not agreed meanwhile: of lost members, and of timeouts.
        """
        return not isinstance(self.error, CollectiveError) or isinstance(self.error, MismatchError)

    def encode(self) -> bytes:
        if self.outcome is Outcome.ERROR:
            return b"\2" + pickle.dumps((self.error, self.waiting))
        return bytes((self.outcome,)) + self.result

    @classmethod
    def decode(cls, data: bytes) -> Verdict:
        outcome = _OUTCOMES[data[0]]
        if outcome is Outcome.ERROR:
            error, waiting = read_report(data[1:])
            return cls(Outcome.ERROR, error=error, waiting=waiting)
        return cls(outcome, data[1:])


def conclude(ranks: Sequence[int], frames: Mapping[int, Frame], combine: Combine | None) -> Verdict:
    """Return the verdict on the frames of an exchange.

    Args:
        ranks: The global ranks of the members.
        frames: Their frames, by group rank; some may be missing if one of the others reports an error.
        combine: Computes the result.
    """
    members = range(len(ranks))
    if all(frame.kind is FrameKind.CALL for frame in frames.values()):
        if len({frame.digest for frame in frames.values()}) > 1:
            return Verdict(Outcome.DIFFERENT)
        return combined([frames[member].body for member in members], combine)
    error = reported_error(ranks, frames)
    if error is None:
        error = mismatch_error(ranks, [read_report(frames[member].body) for member in members])
    bodies = [frame.body for frame in frames.values() if frame.kind is FrameKind.WAITING_IN_OTHER_GROUP]
    return Verdict(Outcome.ERROR, error=error, waiting=[read_report(body) for body in bodies])


def combined(bodies: Sequence[bytes], combine: Combine | None) -> Verdict:
    """Return the verdict on calls that agree: the combination of their messages, or the error of combining them."""
    if combine is None:
        return Verdict(Outcome.AGREED)
    try:
        return Verdict(Outcome.AGREED, combine(bodies))
    except RankwiseError as error:
        return Verdict(Outcome.ERROR, error=error.with_traceback(None))
    except Exception as error:  # noqa: BLE001 - the other members raise it as well
        return Verdict(Outcome.ERROR, error=CollectiveError(f"the values cannot be combined: {summary(error)}"))
