"""The calls that a rank is in, as another one knows them; and who records those of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rankwise._text import ranks_text


@dataclass(frozen=True, slots=True)
class OngoingCall:
    """A call of a group that a rank is in.

    Attributes:
        text: The operation and its call site: "all_reduce at train.py:88".
        group: The id of the group.
        ranks: The global ranks of its members.
        sequence: The number of the exchange in the group.
        seconds: How long the rank has been in it; over a connection, since its frame has arrived here.
    """

    text: str
    group: int
    ranks: Sequence[int]
    sequence: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.text} in the group of {ranks_text(self.ranks)}, for {self.seconds:.1f} s"


class Recorder(Protocol):
    """Records the calls of this rank, of all of its groups; several threads may call at the same time."""

    def begin(self, group: int, sequence: int, call: str) -> int:
        """Record that this rank comes to a call; return a number for its end."""

    def end(self, number: int) -> None:
        """Record that the call has ended, after all members have come; not if it has failed."""


class OngoingCalls(Protocol):
    """The calls of one group."""

    def ongoing_call(self, rank: int) -> OngoingCall | None:
        """Return the call that a rank is in, None if none is known; any thread may ask. Does not wait."""
