"""The calls of many members in few records: equal calls are one, with a message for each member. No I/O."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rankwise._comm.control.protocol import Details, Frame, FrameKind, decode_frame, mismatch_error, read_report
from rankwise._comm.control.verdict import Combine, Outcome, Verdict, combined

# The numbers of ranges, of members, and of bodies, which follow in this order.
_COUNTS: Final = struct.Struct("<III")


@dataclass(slots=True)
class Calls:
    """Equal calls of some members of a group.

    Attributes:
        frame: The frame of the first of them; its body is not meant.
        members: Their group ranks, in ranges.
        waited: How long the exchange before took each of them, in seconds, in this order.
        bodies: The body of each, in this order; a single one if all are the same.
    """

    frame: Frame
    members: list[range]
    waited: array[float]
    bodies: list[bytes]

    @classmethod
    def of(cls, member: int, frame: Frame) -> Calls:
        """Return the call of one member."""
        return cls(frame, [range(member, member + 1)], array("f", [frame.waited]), [frame.body])

    @property
    def kind(self) -> FrameKind:
        """The kind of the frames."""
        return self.frame.kind

    def body_of_each(self) -> list[bytes]:
        """Return the body of each member, in their order."""
        return self.bodies if len(self.bodies) == len(self.waited) else self.bodies * len(self.waited)

    def each(self) -> Iterator[int]:
        """Return the group ranks."""
        return (member for members in self.members for member in members)

    def encode(self) -> list[bytes]:
        bounds = array("I", [bound for members in self.members for bound in (members.start, members.stop)])
        lengths = array("I", map(len, self.bodies))
        counts = _COUNTS.pack(len(self.members), len(self.waited), len(self.bodies))
        arrays = [part.tobytes() for part in (bounds, self.waited, lengths)]
        return [self.frame.encode(b""), counts, *arrays, *self.bodies]


def merged(records: Iterable[Calls]) -> list[Calls]:
    """Return the same calls in as few records as possible."""
    found: dict[object, list[Calls]] = {}
    for calls in records:
        # Details, which differ between few groups of members, are merged only if they are the same.
        details = calls.bodies[0] if calls.kind is FrameKind.DETAILS else b""
        found.setdefault((calls.kind, calls.frame.digest, calls.frame.reads, details), []).append(calls)
    return [_joined(same) for same in found.values()]


def _joined(records: Sequence[Calls]) -> Calls:
    first = records[0]
    if len(records) == 1:
        return first
    are_same = all(len(calls.bodies) == 1 and calls.bodies[0] == first.bodies[0] for calls in records)
    members: list[range] = []
    waited = array("f")
    for calls in records:
        for more in calls.members:
            if members and members[-1].stop == more.start:
                members[-1] = range(members[-1].start, more.stop)
            else:
                members.append(more)
        waited += calls.waited
    bodies = first.bodies if are_same else [body for calls in records for body in calls.body_of_each()]
    return Calls(first.frame, members, waited, bodies)


def encode_calls(records: Iterable[Calls]) -> bytes:
    """Return records as the body of a frame."""
    return b"".join(part for calls in records for part in calls.encode())


def decode_calls(body: bytes) -> list[Calls]:
    """Return the records in the body of a frame."""
    records, offset = [], 0
    while offset < len(body):
        frame, length, _ = decode_frame(body, offset)
        offset += length
        num_ranges, num_members, num_bodies = _COUNTS.unpack_from(body, offset)
        offset += _COUNTS.size
        bounds, waited, lengths = array("I"), array("f"), array("I")
        for values, count in ((bounds, 2 * num_ranges), (waited, num_members), (lengths, num_bodies)):
            end = offset + count * values.itemsize
            values.frombytes(body[offset:end])
            offset = end
        bodies = []
        for size in lengths:
            bodies.append(body[offset : offset + size])
            offset += size
        records.append(Calls(frame, [range(*bounds[at : at + 2]) for at in range(0, len(bounds), 2)], waited, bodies))
    return records


def bodies_of(records: Iterable[Calls], size: int) -> list[bytes]:
    """Return the bodies of all members, by group rank."""
    bodies = [b""] * size
    for calls in records:
        each = calls.body_of_each()
        start = 0
        for members in calls.members:
            bodies[members.start : members.stop] = each[start : start + len(members)]
            start += len(members)
    return bodies


def conclude_calls(ranks: Sequence[int], records: Sequence[Calls], combine: Combine | None) -> Verdict:
    """Return the verdict on the calls of all members, or on the details of calls that differ."""
    if records[0].kind is FrameKind.CALL:
        if len({calls.frame.digest for calls in records}) > 1:
            return Verdict(Outcome.DIFFERENT)
        return combined([] if combine is None else bodies_of(records, len(ranks)), combine)
    read: dict[bytes, Details] = {body: read_report(body) for calls in records for body in calls.bodies}
    details = [read[body] for body in bodies_of(records, len(ranks))]
    return Verdict(Outcome.ERROR, error=mismatch_error(ranks, details))
