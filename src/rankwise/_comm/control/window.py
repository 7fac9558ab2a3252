"""The window of a group in the page of its host: a slot for each member, and one for the verdict of the leader.

A member writes its frame, and then, behind a fence, the number of the exchange. Each slot has room for two frames, used
in turn: the frame of an exchange may be read until all members have come to the next one.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from typing import Final

from rankwise._comm.control.page_memory import PageMemory
from rankwise._comm.control.protocol import HEADER, Frame, FrameKind, decode_frame
from rankwise._comm.control.window_overflow import TEXT_OFFSET, WindowOverflow

_FRAME_BYTES: Final = 8192
_REASON_BYTES: Final = 4096
_SLOT_BYTES: Final = 2 * _FRAME_BYTES + _REASON_BYTES
_SEQUENCE: Final = struct.Struct("<Q")
# The first two words are not zero after any member has failed, timed out or left, and after any frame went to a ring.
# Then there are rows with a word for each slot: the last exchange of each parity that has a frame there; the last one
# with a frame in the ring; the last one that the member has failed in or timed out in; the last one that it has
# finished; whether it has left; whether any body did not fit into the slot; whether the member sleeps; when its last
# frame was written, on the monotonic clock of the host, in nanoseconds; and the last meeting that it has come to.
_ANY_PROBLEM: Final = 0
_ANY_RING: Final = 1
_FIRST_WORD: Final = 8
_ROWS: Final = 10

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
        finished: For each slot the last exchange that the member has finished: it reads nothing of it any more. It is
            written behind a fence.
        sleeping: For each slot whether the member sleeps until it is woken, or is about to.
        met: For each slot the last meeting that the member has come to; for that of the verdict, that all have come to.
    """

    def __init__(self, memory: PageMemory, number: int, num_members: int) -> None:
        """Open the window.

        Args:
            memory: The memory of the page.
            number: The number of the window in the page.
            num_members: The number of members.

        Raises:
            OSError: It cannot be mapped.
        """
        self.number = number
        self.verdict_slot = num_members
        self._memory = memory
        self._slots = num_members + 1
        self._view = memory.open_window(number)
        self._words = self._view[: _words_bytes(num_members)].cast("Q")
        firsts = range(_FIRST_WORD, _FIRST_WORD + _ROWS * self._slots, self._slots)
        self._rows = [self._words[first : first + self._slots] for first in firsts]
        *self._frames, self._ring, self._problem, self.finished = self._rows[:5]
        self._left, self._is_large, self.sleeping, self._written_at, self.met = self._rows[5:]
        self._starts = [_words_bytes(num_members) + slot * _SLOT_BYTES for slot in range(self._slots)]
        self._own_lock = threading.Lock()
        self._own_lock.acquire()
        self._overflow = WindowOverflow(memory, number)

    def write(self, slot: int, frame: Frame, *, has_room: bool) -> None:
        """Write a frame, and then its sequence number.

        Args:
            slot: The slot.
            frame: The frame.
            has_room: No member reads the frame of the last exchange but one any more, so the slot has room.
        """
        sequence, parity = frame.sequence, frame.sequence & 1
        self._written_at[slot] = time.monotonic_ns()
        data = frame.encode()
        if has_room:
            if self._overflow.written:
                self._overflow.free_before(sequence - 1)
            if len(data) > _FRAME_BYTES:
                header = len(data) - len(frame.body)
                self._is_large[slot] = 1
                self._overflow.write(self._overflow.body(slot, parity), data[header:], sequence)
                data = data[:header]
            start = self._starts[slot] + parity * _FRAME_BYTES
            self._view[start : start + len(data)] = data
        else:
            self._overflow.write(self._overflow.entry(slot, sequence), data, sequence)
            self._words[_ANY_RING] = 1
        if frame.kind in _PROBLEMS:
            self._set_problem(self._problem, slot, sequence)
        self.fence()
        (self._frames[parity] if has_room else self._ring)[slot] = sequence

    def read(self, slot: int, sequence: int) -> Frame:
        """Return the frame of an exchange that this member has not finished, and that has arrived."""
        parity = sequence & 1
        if self._frames[parity][slot] != sequence:
            return self._read_ring(slot, sequence)
        start = self._starts[slot] + parity * _FRAME_BYTES
        frame, header, length = decode_frame(self._view, start)
        if header + length <= _FRAME_BYTES:
            frame.body = bytes(self._view[start + header : start + header + length])
        else:
            frame.body = self._memory.read(self._overflow.body(slot, parity), length)
        return frame

    def body(self, slot: int, sequence: int) -> bytes:
        """Return the body of the frame of an exchange, as `read` does, without decoding the rest of the frame."""
        if self._frames[sequence & 1][slot] != sequence:
            return self._read_ring(slot, sequence).body
        start = self._starts[slot] + (sequence & 1) * _FRAME_BYTES
        length, *_, call_length = HEADER.unpack_from(self._view, start)
        first = start + HEADER.size + call_length
        if first + length > start + _FRAME_BYTES:
            return self._memory.read(self._overflow.body(slot, sequence & 1), length)
        return bytes(self._view[first : first + length])

    def bodies_of_calls(self, sequence: int, digest: bytes) -> list[bytes] | None:
        """Return the bodies of all members, by group rank, if their frames are all of calls with this digest.

        None if one is another frame, or is not in its slot.
        """
        bodies: list[bytes] = []
        offset = (sequence & 1) * _FRAME_BYTES
        for last, start in zip(self._frames[sequence & 1], self._starts, strict=True):
            if len(bodies) == self.verdict_slot:
                break
            length, _, _, kind, _, other, call_length = HEADER.unpack_from(self._view, start + offset)
            header = HEADER.size + call_length
            if last != sequence or kind or other != digest or header + length > _FRAME_BYTES:
                return None
            first = start + offset + header
            bodies.append(bytes(self._view[first : first + length]))
        return bodies

    def num_arrived(self, sequence: int) -> int:
        """Return how many slots have a frame of an exchange, which this member has not finished."""
        if not self._words[_ANY_RING]:
            return self._frames[sequence & 1].tolist().count(sequence)
        return sum(self.has_arrived(slot, sequence) for slot in range(self._slots))

    def has_arrivals(self, sequence: int, num_arrived: int) -> bool:
        """Return whether not exactly so many slots have a frame of an exchange, as `num_arrived` returned."""
        return self.num_arrived(sequence) != num_arrived

    def has_arrived(self, slot: int, sequence: int) -> bool:
        """Return whether there is a frame of an exchange, which this member has not finished."""
        return self._frames[sequence & 1][slot] == sequence or self._ring[slot] >= sequence

    def last_call(self, slot: int) -> str:
        """Return the text of the last call of a member, which may write at the same time; "" if there is none."""
        last = self._last_entered(slot)
        if not last:
            return ""
        if self._ring[slot] == last:
            data = self._memory.read(self._overflow.entry(slot, last), _FRAME_BYTES)
        else:
            start = self._starts[slot] + (last & 1) * _FRAME_BYTES
            data = bytes(self._view[start : start + _FRAME_BYTES])
        frame, _, _ = decode_frame(data)
        return frame.call

    def ongoing_call(self, slot: int) -> tuple[str, int, float] | None:
        """Return the call that a member has entered and not finished; None if there is none. Any thread may ask.

        Returns:
            The text of the call, the number of the exchange, and when it began, on the monotonic clock.
        """
        sequence = self._last_entered(slot)
        if sequence <= self.finished[slot]:
            return None
        call = self.last_call(slot), sequence, self._written_at[slot] / 1e9
        _fence()
        # Otherwise it has written over a part of it.
        return call if self._last_entered(slot) == sequence > self.finished[slot] else None

    def has_problem(self, sequence: int) -> bool:
        """Return whether a member may have failed in an exchange, may have timed out in it, or has left."""
        if not self._words[_ANY_PROBLEM]:
            return False
        return max(self._problem) >= sequence or any(self._left)

    def set_timed_out(self, slot: int, sequence: int, text: str) -> None:
        """Record that a member has waited longer than its timeout in an exchange."""
        record = _SEQUENCE.pack(sequence) + _encoded(text)
        self._overflow.write(self._overflow.entry(slot, sequence) + TEXT_OFFSET, record, sequence)
        self.fence()
        self._set_problem(self._problem, slot, sequence)
        self.fence()

    def timed_out(self, sequence: int) -> str:
        """Return the error message of a member that has timed out in an exchange; "" if none has."""
        for slot, last in enumerate(self._problem):
            if last >= sequence:
                record = self._memory.read(self._overflow.entry(slot, sequence) + TEXT_OFFSET, _REASON_BYTES)
                if _SEQUENCE.unpack_from(record)[0] == sequence:
                    return record[_SEQUENCE.size :].rstrip(b"\0").decode(errors="replace")
        return ""

    def set_left(self, slot: int, reason: str) -> None:
        """Record why a member takes part in no further exchange."""
        start = self._starts[slot] + 2 * _FRAME_BYTES
        self._view[start : start + _REASON_BYTES] = _encoded(reason).ljust(_REASON_BYTES, b"\0")
        self.fence()
        self._set_problem(self._left, slot, 1)

    def left(self, slot: int) -> str:
        """Return why a member takes part in no further exchange; "" if it does."""
        if not self._left[slot]:
            return ""
        self.fence()
        start = self._starts[slot] + 2 * _FRAME_BYTES
        return bytes(self._view[start : start + _REASON_BYTES]).rstrip(b"\0").decode(errors="replace")

    def fence(self) -> None:
        """Order this thread's earlier reads and writes of memory before its later ones, as other processes see them."""
        # A release that is followed by an acquisition is a full barrier, on ARM too; on x86 each of them is one.
        self._own_lock.release()
        self._own_lock.acquire()

    def free(self) -> None:
        """Free the memory, which is zero for the next group; no member reads it any more."""
        for slot in range(self._slots):
            if self._problem[slot] or self._ring[slot]:
                self._overflow.free_ring(slot)
            if self._is_large[slot]:
                self._overflow.free_bodies(slot)
        self._memory.free(self._memory.window_offset(self.number), window_bytes(self._slots - 1))

    def close(self) -> None:
        """Close this process's access."""
        for view in (*self._rows, self._words, self._view):
            view.release()
        self._memory.close_window(self.number)

    def _last_entered(self, slot: int) -> int:
        return int(max(self._frames[0][slot], self._frames[1][slot], self._ring[slot]))

    def _set_problem(self, row: memoryview, slot: int, value: int) -> None:
        row[slot] = value
        self._words[_ANY_PROBLEM] = 1

    def _read_ring(self, slot: int, sequence: int) -> Frame:
        offset = self._overflow.entry(slot, sequence)
        frame, header, length = decode_frame(self._memory.read(offset, _FRAME_BYTES))
        frame.body = self._memory.read(offset + header, length)
        return frame


def _fence() -> None:
    """Order memory as `Window.fence` does, in a thread that is not in an exchange of the group."""
    lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass


def _encoded(text: str) -> bytes:
    """Return a text as it is stored."""
    return text.encode(errors="backslashreplace")[: _REASON_BYTES - _SEQUENCE.size]


def _words_bytes(num_members: int) -> int:
    return _round_up(8 * (_FIRST_WORD + _ROWS * (num_members + 1)))


def _round_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
