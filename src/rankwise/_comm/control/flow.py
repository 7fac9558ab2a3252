"""Data that moves between ranks as part of a collective of a group: the interface of each way for it to move."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from typing import Final

# The longest single wait. Between waits, signal handlers run (Ctrl-C) and lost ranks are noticed.
SLICE_SECONDS: Final = 0.5
# How long to wait for what may be on the way: after a loss the last frames of that member, or the end of the member
# because of which it left; after the end of an exchange the verdict on it.
LOSS_SECONDS: Final = 0.1


class Flow(ABC):
    """Data on its way to ranks and from them; both sides know the lengths."""

    @property
    @abstractmethod
    def pending(self) -> AbstractSet[int]:
        """The ranks to or from which data is left to move."""

    @abstractmethod
    def step(self) -> int:
        """Send and receive as much as possible without waiting, and return the number of bytes."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until data may be sent or received, or a rank may be lost."""

    def lost(self, rank: int) -> str:  # noqa: ARG002
        """Return why no more data comes from a rank, or goes to it, as far as this transfer knows; "" if it does."""
        return ""

    def end(self) -> None:  # noqa: B027 - not all have something to end
        """End the transfer, also in the middle of the data: its buffers are written to no more."""
