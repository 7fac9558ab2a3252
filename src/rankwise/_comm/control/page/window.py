"""The window of a group in the page of its host: a slot for each member, and one for the verdict of the leader.

A member writes its frame, and then, behind a fence, the number of the exchange. Each slot has room for two frames, used
in turn: the frame of an exchange may be read until all members have come to the next one. Where everything is in the
memory: `layout`.
"""

from __future__ import annotations

import struct
import threading
from typing import Final

from rankwise._comm.control.page.layout import (
    ANY_PROBLEM,
    ANY_RING,
    ARRIVALS,
    BODY_BYTES,
    ENTRY_BYTES,
    FIRST_WORD,
    FRAME_BYTES,
    REASON_BYTES,
    RING_ENTRIES,
    SLOT_BYTES,
    TEXT_OFFSET,
    Row,
    arrivals_start,
    body_offset,
    ring_entry_offset,
    window_bytes,
    words_bytes,
)
from rankwise._comm.control.page.memory import PageMemory
from rankwise._comm.control.protocol import HEADER, Frame, FrameKind, decode_frame

_SEQUENCE: Final = struct.Struct("<Q")

# The kinds of frames after which the members do not wait for the frames of the others.
_PROBLEMS: Final = frozenset({FrameKind.FAILED, FrameKind.WAITING_IN_OTHER_GROUP})


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
        arrivals: For each member when it came to each of the last exchanges, on the monotonic clock.
        unverified: For each slot the number of calls of the member that were not verified.
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
        self._words = self._view[: words_bytes(num_members)].cast("Q")
        firsts = [FIRST_WORD + row * self._slots for row in Row]
        self._rows = rows = [self._words[first : first + self._slots] for first in firsts]
        self._frames = rows[Row.EVEN], rows[Row.ODD]
        self._ring, self._problem, self._left = rows[Row.RING], rows[Row.PROBLEM], rows[Row.LEFT]
        self._is_large = rows[Row.LARGE]
        arrivals = self._view[arrivals_start(num_members) :].cast("d")
        self.arrivals = [arrivals[slot * ARRIVALS : (slot + 1) * ARRIVALS] for slot in range(num_members)]
        self.finished, self.sleeping, self.met = rows[Row.FINISHED], rows[Row.SLEEPING], rows[Row.MET]
        self.unverified = rows[Row.UNVERIFIED]
        self._starts = [words_bytes(num_members) + slot * SLOT_BYTES for slot in range(self._slots)]
        self._own_lock = threading.Lock()
        self._own_lock.acquire()
        # What this member has written behind the windows: the length and the exchange, by offset in the file.
        self._overflow: dict[int, tuple[int, int]] = {}

    def write(self, slot: int, frame: Frame, *, has_room: bool) -> None:
        """Write a frame, and then its sequence number.

        Args:
            slot: The slot.
            frame: The frame.
            has_room: No member reads the frame of the last exchange but one any more, so the slot has room.
        """
        sequence, parity = frame.sequence, frame.sequence & 1
        data = frame.encode()
        if has_room:
            if self._overflow:
                self._free_overflow_before(sequence - 1)
            if len(data) > FRAME_BYTES:
                header = len(data) - len(frame.body)
                self._is_large[slot] = 1
                self._write_overflow(self._body(slot, parity), data[header:], sequence)
                data = data[:header]
            start = self._starts[slot] + parity * FRAME_BYTES
            self._view[start : start + len(data)] = data
        else:
            self._write_overflow(self._ring_entry(slot, sequence), data, sequence)
            self._words[ANY_RING] = 1
        if frame.kind in _PROBLEMS:
            self._set_problem(self._problem, slot, sequence)
        self.fence()
        (self._frames[parity] if has_room else self._ring)[slot] = sequence

    def read(self, slot: int, sequence: int) -> Frame:
        """Return the frame of an exchange that this member has not finished, and that has arrived."""
        parity = sequence & 1
        if self._frames[parity][slot] != sequence:
            return self._read_ring(slot, sequence)
        start = self._starts[slot] + parity * FRAME_BYTES
        frame, header, length = decode_frame(self._view, start)
        if header + length <= FRAME_BYTES:
            frame.body = bytes(self._view[start + header : start + header + length])
        else:
            frame.body = self._memory.read(self._body(slot, parity), length)
        return frame

    def body(self, slot: int, sequence: int) -> bytes:
        """Return the body of the frame of an exchange, as `read` does, without decoding the rest of the frame."""
        if self._frames[sequence & 1][slot] != sequence:
            return self._read_ring(slot, sequence).body
        start = self._starts[slot] + (sequence & 1) * FRAME_BYTES
        length, *_, call_length = HEADER.unpack_from(self._view, start)
        first = start + HEADER.size + call_length
        if first + length > start + FRAME_BYTES:
            return self._memory.read(self._body(slot, sequence & 1), length)
        return bytes(self._view[first : first + length])

    def bodies_of_calls(self, sequence: int, digest: bytes) -> list[bytes] | None:
        """Return the bodies of all members, by group rank, if their frames are all of calls with this digest.

        None if one is another frame, or is not in its slot.
        """
        bodies: list[bytes] = []
        offset = (sequence & 1) * FRAME_BYTES
        for last, start in zip(self._frames[sequence & 1], self._starts, strict=True):
            if len(bodies) == self.verdict_slot:
                break
            length, _, _, kind, _, _, other, call_length = HEADER.unpack_from(self._view, start + offset)
            header = HEADER.size + call_length
            if last != sequence or kind or other != digest or header + length > FRAME_BYTES:
                return None
            first = start + offset + header
            bodies.append(bytes(self._view[first : first + length]))
        return bodies

    def num_arrived(self, sequence: int) -> int:
        """Return how many slots have a frame of an exchange, which this member has not finished."""
        if not self._words[ANY_RING]:
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
            data = self._memory.read(self._ring_entry(slot, last), FRAME_BYTES)
        else:
            start = self._starts[slot] + (last & 1) * FRAME_BYTES
            data = bytes(self._view[start : start + FRAME_BYTES])
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
        call = self.last_call(slot), sequence, self.arrivals[slot][sequence % ARRIVALS]
        _fence()
        # Otherwise it has written over a part of it.
        return call if self._last_entered(slot) == sequence > self.finished[slot] else None

    def has_problem(self, sequence: int) -> bool:
        """Return whether a member may have failed in an exchange, may have timed out in it, or has left."""
        if not self._words[ANY_PROBLEM]:
            return False
        return max(self._problem) >= sequence or any(self._left)

    def set_ended(self, slot: int, sequence: int, text: str) -> None:
        """Record that a member waits no longer in an exchange."""
        record = _SEQUENCE.pack(sequence) + _encoded(text)
        self._write_overflow(self._ring_entry(slot, sequence) + TEXT_OFFSET, record, sequence)
        self.fence()
        self._set_problem(self._problem, slot, sequence)
        self.fence()

    def ended(self, sequence: int) -> str:
        """Return what a member has recorded that waits no longer in an exchange; "" if none has."""
        for slot, last in enumerate(self._problem):
            if last >= sequence:
                record = self._memory.read(self._ring_entry(slot, sequence) + TEXT_OFFSET, REASON_BYTES)
                if _SEQUENCE.unpack_from(record)[0] == sequence:
                    return record[_SEQUENCE.size :].rstrip(b"\0").decode(errors="replace")
        return ""

    def set_left(self, slot: int, reason: str) -> None:
        """Record why a member takes part in no further exchange."""
        start = self._starts[slot] + 2 * FRAME_BYTES
        self._view[start : start + REASON_BYTES] = _encoded(reason).ljust(REASON_BYTES, b"\0")
        self.fence()
        self._set_problem(self._left, slot, 1)

    def left(self, slot: int) -> str:
        """Return why a member takes part in no further exchange; "" if it does."""
        if not self._left[slot]:
            return ""
        self.fence()
        start = self._starts[slot] + 2 * FRAME_BYTES
        return bytes(self._view[start : start + REASON_BYTES]).rstrip(b"\0").decode(errors="replace")

    def fence(self) -> None:
        """Order this thread's earlier reads and writes of memory before its later ones, as other processes see them."""
        # Python has no memory barrier, and a lock is what comes nearest. CPython's lock is an atomic read-modify-write:
        # its release keeps what was before from moving down, its acquisition keeps what comes after from moving up. In
        # this order, one directly after the other, nothing can pass both: on x86 each is a locked instruction, which is
        # a full barrier by itself; on ARM a store-release and a load-acquire that follow each other are not reordered.
        # This is an assumption on CPython, not a promise of it. No test can see a processor reorder memory: those in
        # `tests/comm/test_pages.py` look at where the fences stand. The lock is this member's own, and never contended.
        self._own_lock.release()
        self._own_lock.acquire()

    def free(self) -> None:
        """Free the memory, which is zero for the next group; no member reads it any more."""
        for slot in range(self._slots):
            if self._problem[slot] or self._ring[slot]:
                self._memory.free(self._ring_entry(slot, 0), RING_ENTRIES * ENTRY_BYTES)
            if self._is_large[slot]:
                self._memory.free(self._body(slot, 0), 2 * BODY_BYTES)
        self._memory.free(self._memory.window_offset(self.number), window_bytes(self._slots - 1))

    def close(self) -> None:
        """Close this process's access."""
        for arrivals in self.arrivals:
            arrivals.release()
        for view in (*self._rows, self._words, self._view):
            view.release()
        self._memory.close_window(self.number)

    def _body(self, slot: int, parity: int) -> int:
        return body_offset(self.number, slot, parity)

    def _ring_entry(self, slot: int, sequence: int) -> int:
        return ring_entry_offset(self.number, slot, sequence)

    def _write_overflow(self, offset: int, data: bytes, sequence: int) -> None:
        """Write a record of an exchange behind the windows."""
        if offset in self._overflow:
            self._free_overflow(offset)
        self._overflow[offset] = len(data), sequence
        self._memory.write(offset, data)

    def _free_overflow_before(self, sequence: int) -> None:
        """Free what this member has written there for the exchanges before this one."""
        for offset in [offset for offset, (_, written) in self._overflow.items() if written < sequence]:
            self._free_overflow(offset)

    def _free_overflow(self, offset: int) -> None:
        length, _ = self._overflow.pop(offset)
        self._memory.free(offset, length)

    def _last_entered(self, slot: int) -> int:
        return int(max(self._frames[0][slot], self._frames[1][slot], self._ring[slot]))

    def _set_problem(self, row: memoryview, slot: int, value: int) -> None:
        row[slot] = value
        self._words[ANY_PROBLEM] = 1

    def _read_ring(self, slot: int, sequence: int) -> Frame:
        offset = self._ring_entry(slot, sequence)
        frame, header, length = decode_frame(self._memory.read(offset, FRAME_BYTES))
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
    return text.encode(errors="backslashreplace")[: REASON_BYTES - _SEQUENCE.size]
