"""Data of a group that was read from a connection by a thread of another group, for the thread that will ask for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


class AbandonedDataError(Exception):
    """The peer has left a group in the middle of its data."""


@dataclass(slots=True)
class _Transfer:
    """The data of one transfer.

    Attributes:
        data: The data that has been read, and not taken.
        is_complete: All of it has been read.
        is_abandoned: The peer has left the group in the middle of it.
    """

    data: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    is_abandoned: bool = False


class KeptData:
    """The data of one group, in the order of its transfers; false if there is none."""

    def __init__(self) -> None:
        self._transfers: deque[_Transfer] = deque()

    def __bool__(self) -> bool:
        return bool(self._transfers)

    def add(self, data: memoryview, *, is_complete: bool, is_abandoned: bool) -> None:
        """Add data that follows the last one; if that was complete, it begins the next transfer.

        Args:
            data: The data.
            is_complete: It ends the transfer.
            is_abandoned: If so, whether the peer has left the group in the middle of it.
        """
        if not self._transfers or self._transfers[-1].is_complete:
            self._transfers.append(_Transfer())
        last = self._transfers[-1]
        last.data += data
        last.is_complete, last.is_abandoned = is_complete, is_complete and is_abandoned

    def take(self, buffer: memoryview) -> tuple[int, bool]:
        """Move data of the first transfer into a buffer.

        Returns:
            The number of bytes, one more at the end of the data; and whether that end was reached.

        Raises:
            AbandonedDataError: The peer has left the group in the middle of its data.
        """
        first = self._transfers[0]
        count = min(len(first.data), len(buffer))
        buffer[:count] = first.data[:count]
        del first.data[:count]
        if first.data:
            return count, False
        self._transfers.popleft()  # the rest of incomplete data is still in the connection
        if first.is_abandoned:
            raise AbandonedDataError
        return count + first.is_complete, first.is_complete
