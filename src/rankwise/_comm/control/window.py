"""The window of a group in the page of its host: a slot for each member, and one for the verdict of the leader.

A member writes its frame, and then, behind a fence, the number of the exchange. Each slot has room for two frames, used
in turn: the frame of an exchange may be read until all members have come to the next one.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Final

from rankwise._comm.control.protocol import Frame, FrameKind, decode_frame, frame_size

_FRAME_BYTES: Final = 8192
_REASON_BYTES: Final = 4096
_SLOT_BYTES: Final = 2 * _FRAME_BYTES + 3 * _REASON_BYTES
# Bodies that do not fit into a slot are in the file behind all windows, each in an area of its own.
_BODIES_OFFSET: Final = 1 << 52
_BODY_BYTES: Final = 1 << 34
# The length of the file, all of it a hole at first.
FILE_BYTES: Final = 1 << 60
# The largest number of ranks on a host: two descriptors for each are sent in one message, which carries at most 253.
MAX_RANKS: Final = 126
# The first word is not zero after any member has failed, timed out or left. Then there are rows with a word for each
# slot: the last exchange of each parity that has a frame there, that the member has failed in, and that it has timed
# out in; the last one that it has finished; and whether it has left.
_ANY_PROBLEM: Final = 0
_FIRST_WORD: Final = 8
_FRAMES: Final = 0
_FAILED: Final = 2
_TIMED_OUT: Final = 4
_FINISHED: Final = 6
_LEFT: Final = 7
_ROWS: Final = 8

# The kinds of frames after which the members do not wait for the frames of the others.
_PROBLEMS: Final = frozenset({FrameKind.FAILED, FrameKind.WAITING_IN_OTHER_GROUP})


def window_bytes(num_members: int) -> int:
    """Return the length of the window of a group."""
    return _words_bytes(num_members) + _round_up((num_members + 1) * _SLOT_BYTES)


class Window:
    """The window of one group.

    Slots have the group ranks of the members as indices; that of the verdict follows.

    Attributes:
        number: The number of the window in the page.
        verdict_slot: The index of the slot of the verdict.
    """

    def __init__(self, memory: int, number: int, offset: int, num_members: int) -> None:
        self.number = number
        self.verdict_slot = num_members
        self._memory = memory
        self._slots = num_members + 1
        self._map = mmap.mmap(memory, window_bytes(num_members), offset=offset)
        self._words = memoryview(self._map)[: _words_bytes(num_members)].cast("Q")
        self._starts = [_words_bytes(num_members) + slot * _SLOT_BYTES for slot in range(self._slots)]
        self._own_lock = threading.Lock()
        self._own_lock.acquire()
        # The lengths of this member's bodies that did not fit into their slots, by offset in the file.
        self._large_bodies: dict[int, int] = {}

    def write(self, slot: int, frame: Frame) -> None:
        """Write a frame, and then its sequence number."""
        parity = frame.sequence & 1
        start = self._starts[slot] + parity * _FRAME_BYTES
        data = frame.encode()
        if len(data) > _FRAME_BYTES:
            header, _ = frame_size(data)
            self._write_large(self._body_offset(slot, parity), data[header:])
            data = data[:header]
        self._map[start : start + len(data)] = data
        if frame.kind in _PROBLEMS:
            self._set_problem(_FAILED + parity, slot, frame.sequence)
        self.fence()
        self._words[self._word(_FRAMES + parity, slot)] = frame.sequence

    def read(self, slot: int, sequence: int) -> Frame:
        """Return the frame of an exchange, which its member has written."""
        parity = sequence & 1
        start = self._starts[slot] + parity * _FRAME_BYTES
        header, length = frame_size(self._map, start)
        if header + length <= _FRAME_BYTES:
            body = self._map[start + header : start + header + length]
        else:
            body = _read_at(self._memory, length, self._body_offset(slot, parity))
        return decode_frame(self._map, start, body)

    def arrivals(self, sequence: int) -> list[int]:
        """Return for each slot the last exchange, of the parity of this one, that has a frame there."""
        return self._row(_FRAMES + (sequence & 1))

    def has_arrived(self, slot: int, sequence: int) -> bool:
        """Return whether there is a frame of an exchange in a slot."""
        return self._words[self._word(_FRAMES + (sequence & 1), slot)] == sequence

    def last_frame(self, slot: int) -> Frame | None:
        """Return the last frame of a member; None if there is none."""
        sequence = max(self._words[self._word(_FRAMES + parity, slot)] for parity in (0, 1))
        return self.read(slot, sequence) if sequence else None

    def set_finished(self, slot: int, sequence: int) -> None:
        """Record that a member reads nothing any more of an exchange and those before it."""
        self._words[self._word(_FINISHED, slot)] = sequence

    def finished(self) -> list[int]:
        """Return for each slot the last exchange that the member has finished."""
        return self._row(_FINISHED)

    def has_problem(self, sequence: int) -> bool:
        """Return whether a member has failed in an exchange, has timed out in it, or has left."""
        if not self._words[_ANY_PROBLEM]:
            return False
        parity = sequence & 1
        ended = (*self._row(_FAILED + parity), *self._row(_TIMED_OUT + parity))
        return sequence in ended or any(self._row(_LEFT))

    def set_timed_out(self, slot: int, sequence: int, text: str) -> None:
        """Record that a member has waited longer than its timeout in an exchange."""
        parity = sequence & 1
        self._write_text(slot, parity, text)
        self.fence()
        self._set_problem(_TIMED_OUT + parity, slot, sequence)
        self.fence()

    def timed_out(self, sequence: int) -> str:
        """Return the error message of a member that has timed out in an exchange; "" if none has."""
        parity = sequence & 1
        row = self._row(_TIMED_OUT + parity)
        return self._read_text(row.index(sequence), parity) if sequence in row else ""

    def set_left(self, slot: int, reason: str) -> None:
        """Record why a member takes part in no further exchange."""
        self._write_text(slot, 2, reason)
        self.fence()
        self._set_problem(_LEFT, slot, 1)

    def left(self, slot: int) -> str:
        """Return why a member takes part in no further exchange; "" if it does."""
        return self._read_text(slot, 2) if self._words[self._word(_LEFT, slot)] else ""

    def fence(self) -> None:
        """Order this thread's earlier reads and writes of memory before its later ones, as other processes see them."""
        # A release that is followed by an acquisition is a full barrier, on ARM too; on x86 each of them is one.
        self._own_lock.release()
        self._own_lock.acquire()

    def free(self) -> None:
        """Free the memory, which is zero for the next group."""
        self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Close this process's access."""
        for offset in self._large_bodies:
            self._free_large(offset)
        self._words.release()
        self._map.close()

    def _word(self, row: int, slot: int) -> int:
        return _FIRST_WORD + row * self._slots + slot

    def _row(self, row: int) -> list[int]:
        first = self._word(row, 0)
        words: list[int] = self._words[first : first + self._slots].tolist()
        return words

    def _set_problem(self, row: int, slot: int, value: int) -> None:
        self._words[self._word(row, slot)] = value
        self._words[_ANY_PROBLEM] = 1

    def _write_text(self, slot: int, index: int, text: str) -> None:
        start = self._starts[slot] + 2 * _FRAME_BYTES + index * _REASON_BYTES
        data = text.encode(errors="backslashreplace")[: _REASON_BYTES - 1]
        self._map[start : start + _REASON_BYTES] = data.ljust(_REASON_BYTES, b"\0")

    def _read_text(self, slot: int, index: int) -> str:
        start = self._starts[slot] + 2 * _FRAME_BYTES + index * _REASON_BYTES
        return self._map[start : start + _REASON_BYTES].rstrip(b"\0").decode(errors="replace")

    def _body_offset(self, slot: int, parity: int) -> int:
        return _BODIES_OFFSET + ((self.number * (MAX_RANKS + 1) + slot) * 2 + parity) * _BODY_BYTES

    def _write_large(self, offset: int, body: bytes) -> None:
        if offset in self._large_bodies:
            self._free_large(offset)
        self._large_bodies[offset] = len(body)
        rest = memoryview(body)
        while rest:
            rest = rest[os.pwrite(self._memory, rest, offset + len(body) - len(rest)) :]

    def _free_large(self, offset: int) -> None:
        with mmap.mmap(self._memory, self._large_bodies[offset], offset=offset) as body:
            body.madvise(mmap.MADV_REMOVE)


def _words_bytes(num_members: int) -> int:
    return _round_up(8 * (_FIRST_WORD + _ROWS * (num_members + 1)))


def _round_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _read_at(file: int, length: int, offset: int) -> bytes:
    pieces = []
    while length:
        piece = os.pread(file, length, offset)
        pieces.append(piece)
        offset, length = offset + len(piece), length - len(piece)
    return b"".join(pieces)
