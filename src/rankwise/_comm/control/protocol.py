"""The protocol of checked collectives: the frames that members exchange first, and the errors that differences give.

No data is sent before the frames of all members agree: where sizes differ, gloo ends the process, and where the
collectives differ, it waits forever. This module does no I/O.
"""

from __future__ import annotations

import functools
import hashlib
import socket
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, TypeAlias

from rankwise import errors
from rankwise._restricted_pickles import plain_loads
from rankwise._text import MOST_SHOWN, num_after, ranks_by_value, ranks_text
from rankwise._user_frames import call_site
from rankwise.errors import MismatchError, RankwiseError, RemoteRankError, shortened, summary

# Length of the body, group, sequence number, kind, flags, seconds waited, digest, length of the call's text.
HEADER: Final = struct.Struct("<QQQBBf16sH")
_MAIN: Final = 1
_READS: Final = 2
_Buffer: TypeAlias = bytes | bytearray | memoryview
_NO_DIGEST: Final = bytes(16)
_MAX_CALL_BYTES: Final = 1000
# The traceback of a failed rank must fit into the buffers of its sockets, since that rank waits for no reader.
_MAX_TRACEBACK: Final = 32_000


class FrameKind(IntEnum):
    """The kind of a frame."""

    CALL = 0  # the call of this rank
    FAILED = 1  # this rank raised before it could take part; the body is the `RemoteRankError` of the others
    WAITING_IN_OTHER_GROUP = 2  # it waits in a collective of another group; the body is a `WaitingInOtherGroup`
    DETAILS = 3  # the digests differed; the body is a `Details`
    VERDICT = 4  # the body is the verdict on the exchange
    CALLS = 5  # the body is the calls of several members
    ENDED = 6  # a member waits no longer; the body is the error that all raise, unless there is a verdict
    WAITING = 7  # on the board: members wait in the exchange
    LEFT = 8  # on the board: a rank takes part in nothing any more; the body is the reason


@dataclass(slots=True)
class Frame:
    """One message between two members.

    Attributes:
        kind: The kind of the message.
        call: The operation and its call site, for error messages: "all_reduce at train.py:88".
        digest: The digest of everything that has to be the same on all members.
        body: The content, by kind.
        main: The call was made by the main thread, and this rank waits in no other group.
        reads: This rank reads bodies of others. For an exchange between hosts.
        waited: How long the exchange before took this rank, in seconds; likewise.
        group: The id of the group; set when the frame is sent, as is the sequence number.
        sequence: The number of the exchange in the group.
    """

    kind: FrameKind
    call: str
    digest: bytes = _NO_DIGEST
    body: bytes = b""
    main: bool = True
    group: int = 0
    sequence: int = 0
    reads: bool = False
    waited: float = 0.0

    def encode(self, body: bytes | None = None) -> bytes:
        """Return the bytes of the frame; with another body, if one is given."""
        body = self.body if body is None else body
        call = self.call.encode(errors="backslashreplace")[:_MAX_CALL_BYTES]
        flags = self.main | (_READS if self.reads else 0)
        header = HEADER.pack(
            len(body), self.group, self.sequence, self.kind, flags, self.waited, self.digest, len(call)
        )
        return b"".join((header, call, body))


def decode_frame(data: _Buffer, offset: int = 0) -> tuple[Frame, int, int]:
    """Return an encoded frame without its body, the length of what precedes the body, and that of the body."""
    length, group, sequence, kind, flags, waited, digest, call_length = HEADER.unpack_from(data, offset)
    body_start = HEADER.size + call_length
    call = bytes(data[offset + HEADER.size : offset + body_start]).decode(errors="replace")
    frame = Frame(FrameKind(kind), call, digest, b"", bool(flags & _MAIN), group, sequence)
    frame.reads, frame.waited = bool(flags & _READS), waited
    return frame, body_start, length


def pop_frame(inbox: bytearray) -> Frame | None:
    """Remove the first frame from received bytes; None if it is incomplete."""
    if len(inbox) < HEADER.size:
        return None
    length, *_, call_length = HEADER.unpack_from(inbox)
    if len(inbox) < HEADER.size + call_length + length:
        return None
    frame, start, _ = decode_frame(inbox)
    frame.body = bytes(inbox[start : start + length])
    del inbox[: start + length]
    return frame


@dataclass(slots=True)
class Description:
    """What the call of a collective says of itself, to the other members and in error messages.

    Attributes:
        operation: The name of the function.
        settings: The arguments that have to be the same on all ranks.
        content: The properties of the value that have to be the same, as a short text.
        parts: Returns a description of the value's parts for error messages: path -> "float32[3]". Called only when
            ranks differ.
        is_data: The members have agreed on the call, and this is the next agreement, about its data.
        site: The line of the user's program: "train.py:88"; set when the call enters a group.
        main: The call is one of the rank's program, and this rank waits in no other group; set when it enters a group.
        nested_call_refused: Another call was refused during this one in the same thread. Its error may end this call
            on this rank alone.
        before: The calls of the group since the last agreement, which were not verified: see `UnverifiedCalls`.
    """

    operation: str
    settings: Mapping[str, object] = field(default_factory=dict)
    content: str = ""
    parts: Callable[[], Mapping[str, str]] = dict
    is_data: bool = False
    site: str = ""
    main: bool = True
    nested_call_refused: bool = False
    before: str = ""

    @property
    def title(self) -> str:
        """The call without its value: "all_reduce(op='sum')"."""
        return f"{self.operation}({', '.join(map('{}={!r}'.format, self.settings, self.settings.values()))})"

    @property
    def text(self) -> str:
        """The operation and its call site: "all_reduce at train.py:88", "barrier 'epoch 1' at train.py:90"."""
        name = self.settings.get("name", "")
        return f"{self.operation}{f' {name!r}' if name else ''} at {self.site or call_site()}"

    def digest(self) -> bytes:
        """Return a digest of 16 bytes, equal on all ranks whose calls agree."""
        text = f"{self.operation}{self.settings!r}\0{self.content}{self.before}"
        return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).digest()

    def frame(self, kind: FrameKind = FrameKind.CALL, body: bytes = b"") -> Frame:
        """Return a frame about this call."""
        return Frame(kind, self.text, self.digest(), body, self.main)

    def details(self, failure: RemoteRankError | None = None) -> Details:
        """Return all of this, for the members whose calls differ; or with the failure of this one."""
        before = {"the last unverified call before it": self.before} if self.before else {}
        return Details(self.title, self.site, before | dict(self.parts()), failure)


class UnverifiedCalls:
    """The calls of a group since its last agreement for which this rank has not waited until the calls were compared.

    The next call that is verified has their number and a digest of all of them: so ranks that have made other ones
    learn of it, although their results are wrong already.

    Attributes:
        number: Their number since then.
        total: Their number since the group was made.
    """

    def __init__(self) -> None:
        self.number = self.total = 0
        self._digest = b""
        self._last = ""

    def add(self, call: Description) -> None:
        """Add a call."""
        self.number += 1
        self.total += 1
        self._digest = hashlib.blake2b(self._digest + call.digest(), digest_size=4).digest()
        self._last = f"{call.title} of {', '.join(call.parts().values())}"

    def take(self) -> str:
        """Return a description of the calls, equal on all ranks that have made the same ones, and forget them."""
        text = f"number {self.number}, {self._last} ({self._digest.hex()})"
        self.number, self._digest = 0, b""
        return text


def read_report(body: bytes) -> Any:  # noqa: ANN401 - one of these
    """Return the error or the description in the body of a frame, a pickle that refers to nothing else.

    Raises:
        pickle.UnpicklingError: It refers to something else.
    """
    return plain_loads(body, _REPORTED)


def remote_error(error: BaseException, rank: int, call: str) -> RemoteRankError:
    """Return what the others raise when an exception has ended the call of this rank."""
    text = shortened("".join(traceback.format_exception(error)), _MAX_TRACEBACK)
    return RemoteRankError(rank=rank, host=socket.gethostname(), raised=summary(error), traceback=f"{call}\n{text}")


@dataclass(frozen=True, slots=True)
class WaitingInOtherGroup:
    """The collective of another group in which a rank waits.

    Attributes:
        rank: The global rank.
        call: Its call.
        group, ranks: The id and the members of that group.
        sequence: The exchange.
        cause: The wait in this group from which the rank has learned of the deadlock, and of which others may not know.
    """

    rank: int
    call: str
    group: int
    ranks: Sequence[int]
    sequence: int
    cause: WaitingInOtherGroup | None = None


@dataclass(frozen=True, slots=True)
class Details:
    """The full description of a rank's call, which is sent only after digests differed."""

    title: str
    site: str
    parts: Mapping[str, str]
    failure: RemoteRankError | None = None


_ERRORS: Final = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, RankwiseError)]
_REPORTED: Final = {
    (one.__module__, one.__qualname__): one
    for one in (*_ERRORS, Details, WaitingInOtherGroup, functools.partial, range)
}


def reported_error(ranks: Sequence[int], frames: Mapping[int, Frame]) -> RankwiseError | None:
    """Return the error that frames report: a failed rank, or a deadlock between groups; None if they report none.

    Args:
        ranks: The global ranks of the members.
        frames: Their frames, by group rank.
    """
    for _, frame in sorted(frames.items()):
        if frame.kind is FrameKind.FAILED:
            failure: RemoteRankError = read_report(frame.body)
            return failure
    if all(frame.kind is not FrameKind.WAITING_IN_OTHER_GROUP for frame in frames.values()):
        return None
    texts: dict[int, str] = {}
    for group_rank, frame in frames.items():
        group = ranks
        if frame.kind is FrameKind.WAITING_IN_OTHER_GROUP:
            waiting: WaitingInOtherGroup = read_report(frame.body)
            group, cause = waiting.ranks, waiting.cause
            if cause is not None:
                texts.setdefault(cause.rank, f"{cause.call}, in the group of {ranks_text(ranks)}")
        texts[ranks[group_rank]] = f"{frame.call}, in the group of {ranks_text(group)}"
    ranks_by_call: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks_by_call.setdefault(texts[rank], []).append(rank)
    lines = [f"  {ranks_text(callers)}: {call}" for call, callers in ranks_by_call.items()]
    return MismatchError("\n".join(["deadlock: the ranks wait for each other in different groups:", *lines]))


def mismatch_error(ranks: Sequence[int], details: Sequence[Details]) -> RankwiseError:
    """Return the error of ranks whose calls differ, or of the first one that failed."""
    for detail in details:
        if detail.failure is not None:
            return detail.failure
    ranks_by_call: dict[tuple[str, str], list[int]] = {}
    for rank, detail in zip(ranks, details, strict=True):
        ranks_by_call.setdefault((detail.title, detail.site), []).append(rank)
    shown = list(ranks_by_call.items())[:MOST_SHOWN]
    lines = [f"  {ranks_text(callers)}: {title} at {site}" for (title, site), callers in shown]
    if num_more := num_after(ranks_by_call):
        lines.append(f"  {num_more} more ranks: {len(ranks_by_call) - MOST_SHOWN} more calls")
    return MismatchError("\n".join([f"the calls of the ranks differ: {_difference(ranks, details)}", *lines]))


def _difference(ranks: Sequence[int], details: Sequence[Details]) -> str:
    """Return the first difference between the calls, with the ranks of each side."""
    titles = [detail.title for detail in details]
    if len(set(titles)) > 1:
        return ranks_by_value(ranks, titles)
    paths = dict.fromkeys(path for detail in details for path in detail.parts)
    for path in paths:
        found = [detail.parts.get(path, "nothing") for detail in details]
        if len(set(found)) > 1:
            return f"{path or 'the value'} is {ranks_by_value(ranks, found)}"
    return "the containers around their values"
