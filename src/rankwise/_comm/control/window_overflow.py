"""The parts of a page behind all windows, for records that have no room in the slots of a window.

They are holes in the file until they are written: bodies that do not fit into a slot, and the ring of each slot, for
frames that have no room in it because other members have not read those before. An entry of a ring has the frame of an
exchange, and the error message of a member that has timed out in it.
"""

from __future__ import annotations

from typing import Final

from rankwise._comm.control.page_memory import PageMemory

_BODIES_OFFSET: Final = 1 << 52
_BODY_BYTES: Final = 1 << 34
_RINGS_OFFSET: Final = 1 << 59
_ENTRY_BYTES: Final = 1 << 25
TEXT_OFFSET: Final = _ENTRY_BYTES // 2
# The number of exchanges that a member can be ahead of another one.
RING_ENTRIES: Final = 1 << 10
# The length of the file, all of it a hole at first.
FILE_BYTES: Final = 1 << 60
# The largest number of ranks on a host: two descriptors for each are sent in one message, which carries at most 253.
MAX_RANKS: Final = 126


class WindowOverflow:
    """The records of one window behind all windows.

    Attributes:
        written: What this member has written there: the length and the exchange, by offset in the file.
    """

    def __init__(self, memory: PageMemory, window: int) -> None:
        self.written: dict[int, tuple[int, int]] = {}
        self._memory = memory
        self._first_slot = window * (MAX_RANKS + 1)

    def body(self, slot: int, parity: int) -> int:
        """Return the offset of the bodies of the exchanges of a parity that do not fit into a slot."""
        return _BODIES_OFFSET + ((self._first_slot + slot) * 2 + parity) * _BODY_BYTES

    def entry(self, slot: int, sequence: int) -> int:
        """Return the offset of the entry of an exchange in the ring of a slot."""
        return _RINGS_OFFSET + ((self._first_slot + slot) * RING_ENTRIES + sequence % RING_ENTRIES) * _ENTRY_BYTES

    def write(self, offset: int, data: bytes, sequence: int) -> None:
        """Write a record of an exchange."""
        if offset in self.written:
            self._free(offset)
        self.written[offset] = len(data), sequence
        self._memory.write(offset, data)

    def free_before(self, sequence: int) -> None:
        """Free what this member has written for the exchanges before this one."""
        for offset in [offset for offset, (_, written) in self.written.items() if written < sequence]:
            self._free(offset)

    def free_ring(self, slot: int) -> None:
        """Free the ring of a slot."""
        self._memory.free(self.entry(slot, 0), RING_ENTRIES * _ENTRY_BYTES)

    def free_bodies(self, slot: int) -> None:
        """Free the bodies of a slot."""
        self._memory.free(self.body(slot, 0), 2 * _BODY_BYTES)

    def _free(self, offset: int) -> None:
        length, _ = self.written.pop(offset)
        self._memory.free(offset, length)
