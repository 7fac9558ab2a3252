"""The first message of every checked collective: what a rank is about to do, and what ranks make of each other's. Pure.

Nothing moves before the frames of all members agree: on a size mismatch gloo takes the process down, and on another
collective it waits for ever.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from rankwise._text import ranks_text
from rankwise._user_frames import call_site
from rankwise.errors import MismatchError, RankwiseError, RemoteRankError, shortened, summary

# Body length, sequence number, kind, whether the main thread called, digest, length of the call's text.
_PREFIX: Final = struct.Struct("<QQBB16sH")
_KIND_OFFSET: Final = 16
_NO_DIGEST: Final = bytes(16)
_LONGEST_CALL: Final = 1000
# What a failed rank says of it must fit into its connections, for it waits for nobody to read it.
_LONGEST_TRACEBACK: Final = 32_000


class FrameKind(IntEnum):
    """What a frame says."""

    CALL = 0  # this rank takes part, and wants this
    FAILED = 1  # it raised before it could; the body is a `Failure`
    ELSEWHERE = 2  # it waits in a collective of another group; the body is an `WaitingInOtherGroup`
    DETAILS = 3  # the digests differed; the body is a `Details`
    GAVE_UP = 4  # it waited too long for others
    LEFT = 5  # it will not take part any more; the call says why
    BULK = 6  # the body is data


@dataclass(frozen=True, slots=True)
class Frame:
    """One message between two members.

    Attributes:
        kind: What it says.
        sequence: Which exchange of the group it belongs to; given when it is sent.
        call: The operation and where it was called, for people: "all_reduce at train.py:88".
        digest: Of everything that has to be the same on all members.
        body: What else there is to say.
        main: The main thread called.
    """

    kind: FrameKind
    sequence: int
    call: str
    digest: bytes = _NO_DIGEST
    body: bytes = b""
    main: bool = True

    def encode(self, body: bytes | None = None) -> bytes:
        """Return the frame as it travels, with another body if one is given."""
        call = self.call.encode(errors="backslashreplace")[:_LONGEST_CALL]
        body = self.body if body is None else body
        return b"".join(
            (_PREFIX.pack(len(body), self.sequence, self.kind, self.main, self.digest, len(call)), call, body)
        )


def take_frame(inbox: bytearray) -> Frame | None:
    """Take the first frame out of what was received, if all of it was; data is left where it is."""
    if len(inbox) < _PREFIX.size or is_bulk(inbox):
        return None
    length, sequence, kind, main, digest, call_length = _PREFIX.unpack_from(inbox)
    start = _PREFIX.size + call_length
    if len(inbox) < start + length:
        return None
    call = inbox[_PREFIX.size : start].decode(errors="replace")
    body = bytes(inbox[start : start + length])
    del inbox[: start + length]
    return Frame(FrameKind(kind), sequence, call, digest, body, bool(main))


def is_bulk(inbox: bytearray) -> bool:
    """Return whether data comes next."""
    return len(inbox) >= _PREFIX.size and inbox[_KIND_OFFSET] == FrameKind.BULK


def take_bulk_head(inbox: bytearray) -> None:
    """Take the head of data out of what was received; the data follows."""
    del inbox[: _PREFIX.size]


def bulk_head(length: int) -> bytes:
    """Return what precedes so many bytes of data."""
    return _PREFIX.pack(length, 0, FrameKind.BULK, True, _NO_DIGEST, 0)


@dataclass(slots=True)
class Call:
    """A collective as one rank calls it.

    Attributes:
        operation: The function's name.
        settings: The arguments that have to be the same on all ranks.
        content: What has to be the same about the value: a short text, the same where the values go together.
        parts: Describes the value's parts, for people: path -> "float32[3]". Looked at only when ranks differ.
        is_data: The members have agreed on the call, and this is about its data.
        site: Where the user called: "train.py:88"; noted when the call enters a group.
        agreeing: The others have been told of it.
        refused: They do not call the same, or not all are here; all know it, and nobody waits for data.
        disturbed: Something else wanted to begin in this thread meanwhile, and what that raised may end the call.
    """

    operation: str
    settings: Mapping[str, object] = field(default_factory=dict)
    content: str = ""
    parts: Callable[[], Mapping[str, str]] = dict
    is_data: bool = False
    site: str = ""
    agreeing: bool = False
    refused: bool = False
    disturbed: bool = False

    @property
    def title(self) -> str:
        """The call without its value: "all_reduce(op='sum')"."""
        return f"{self.operation}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"

    @property
    def text(self) -> str:
        """The operation and where it was called: "all_reduce at train.py:88", "barrier 'epoch 1' at train.py:90"."""
        name = self.settings.get("name", "")
        return f"{self.operation}{f' {name!r}' if name else ''} at {self.site or call_site()}"

    def digest(self) -> bytes:
        """Return 16 bytes that are the same on all ranks that call the same."""
        return hashlib.blake2b(
            f"{self.title}\0{self.content}".encode(errors="backslashreplace"), digest_size=16
        ).digest()

    def frame(self, kind: FrameKind = FrameKind.CALL, body: bytes = b"") -> Frame:
        """Return the frame that says so."""
        main = threading.current_thread() is threading.main_thread()
        return Frame(kind, 0, self.text, self.digest(), body, main)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank raised before it could take part."""

    host: str
    raised: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, call: str) -> Failure:
        text = "".join(traceback.format_exception(error))
        return cls(socket.gethostname(), summary(error), f"{call}\n{shortened(text, _LONGEST_TRACEBACK)}")

    def as_error(self, rank: int) -> RemoteRankError:
        """Return it as the others raise it."""
        return RemoteRankError(rank=rank, host=self.host, raised=self.raised, traceback=self.traceback)


@dataclass(frozen=True, slots=True)
class WaitingInOtherGroup:
    """The collective of another group that a rank waits in: the group's name and members, and which exchange."""

    group: str
    ranks: Sequence[int]
    sequence: int


@dataclass(frozen=True, slots=True)
class Details:
    """What a rank called, in full."""

    title: str
    site: str
    parts: Mapping[str, str]
    failure: Failure | None = None

    @classmethod
    def of(cls, call: Call, error: BaseException | None = None) -> Details:
        return cls(call.title, call.site, dict(call.parts()), None if error is None else Failure.of(error, call.text))


def verdict(ranks: Sequence[int], frames: Mapping[int, Frame]) -> RankwiseError | None:
    """Return the error that frames, by place, tell of by themselves: a rank failed, or waits in another group."""
    for place, frame in sorted(frames.items()):
        if frame.kind is FrameKind.FAILED:
            failure: Failure = pickle.loads(frame.body)
            return failure.as_error(ranks[place])
    if all(frame.kind is not FrameKind.ELSEWHERE for frame in frames.values()):
        return None
    said: dict[str, list[int]] = {}
    for place, frame in sorted(frames.items()):
        group = pickle.loads(frame.body).ranks if frame.kind is FrameKind.ELSEWHERE else ranks
        said.setdefault(f"{frame.call}, in the group of {ranks_text(group)}", []).append(ranks[place])
    lines = [f"  {ranks_text(who)}: {call}" for call, who in said.items()]
    return MismatchError("\n".join(["the ranks wait for each other in different groups:", *lines]))


def mismatch(ranks: Sequence[int], details: Sequence[Details]) -> RankwiseError:
    """Return the error of ranks that called different things."""
    for rank, detail in zip(ranks, details, strict=True):
        if detail.failure is not None:
            return detail.failure.as_error(rank)
    said: dict[tuple[str, str], list[int]] = {}
    for rank, detail in zip(ranks, details, strict=True):
        said.setdefault((detail.title, detail.site), []).append(rank)
    lines = [f"  {ranks_text(who)}: {title} at {site}" for (title, site), who in said.items()]
    return MismatchError("\n".join([f"the ranks called different things: {_difference(ranks, details)}", *lines]))


def _difference(ranks: Sequence[int], details: Sequence[Details]) -> str:
    """Name the first thing that is not the same on all ranks, and who has what."""
    titles = [detail.title for detail in details]
    if len(set(titles)) > 1:
        return _sides(ranks, titles)
    paths = dict.fromkeys(path for detail in details for path in detail.parts)
    for path in paths:
        found = [detail.parts.get(path, "nothing") for detail in details]
        if len(set(found)) > 1:
            return f"{path or 'the value'} is {_sides(ranks, found)}"
    return "the containers around their values"


def _sides(ranks: Sequence[int], found: Sequence[str]) -> str:
    sides: dict[str, list[int]] = {}
    for rank, text in zip(ranks, found, strict=True):
        sides.setdefault(text, []).append(rank)
    return ", ".join(f"{text} on {ranks_text(who)}" for text, who in sides.items())
