"""Some ranks that can agree: on who takes part, on what they do next, and on short messages.

A collective is one `taking_part` block: what it needs of this rank alone, then `agree` or a message, which tells that
all ranks do the same, then data. So a rank that fails in its own part is heard of before anybody waits for its data.
"""

from __future__ import annotations

import operator
import os
import pickle
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import torch
from torch.distributed import Store

from rankwise.comm.buffers import contents, to_tensor
from rankwise.comm.frame import Call, Details, Failure, Frame, Kind, mismatch, verdict
from rankwise.comm.ops import Op
from rankwise.errors import CollectiveError, InvalidArgumentError, NotJoinedError, RemoteRankError

# In groups of so many, every member sends its frame to every other. In larger ones they reduce their digests.
FRAMED_RANKS: Final = 64

_LENGTH_BYTES: Final = 8
_WORDS: Final = struct.Struct("<2q")


class Members(ABC):
    """Some ranks of a world, in an order.

    Attributes:
        ranks: Their global ranks. Their order is the order of gathered results.
        size: How many there are.
        rank: This process's place among them, or None if it is not one.
        control: The device that messages travel on that do not travel in frames.
        framed: Every member sends its frame to every other.
        closed: The session that they talked in is closed.
        turns: How often one of them worked while the others waited.
    """

    def __init__(self, *, ranks: Sequence[int], global_rank: int, control: torch.device) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(global_rank) if global_rank in ranks else None
        self.control = control
        self.framed = self.size <= FRAMED_RANKS
        self.closed = False
        self.turns = 0
        self._parts: list[Members] = []
        self._broken = ""
        self._pid = os.getpid()

    def close(self, reason: str = "left") -> None:
        """Let go of what the members talked over, and of the groups that go with this one; tell the others why."""
        self.closed = True
        for part in self._parts:
            part.close(reason)
        self._parts.clear()

    def take_along(self, part: Members) -> None:
        """Close a group of some of these members when this one is closed."""
        self._parts.append(part)

    @contextmanager
    def taking_part(self, call: Call) -> Iterator[int]:
        """Take part in a collective; gives this rank's place.

        What is raised before the members agreed is raised on all of them: the original here, `RemoteRankError` on the
        others. What is raised after that would leave them waiting for data: so this rank leaves the group for good.

        Raises:
            NotJoinedError: The session that the members talked in is closed.
            InvalidArgumentError: This rank is not a member.
            CollectiveError: It has left the group.
        """
        place = self.require_member()
        if self._broken:
            raise CollectiveError(f"{call.text}: this group cannot be used any more: {self._broken}")
        try:
            yield place
        except Exception as error:
            if not call.agreeing:
                self._tell_failure(call, error)
            elif call.agreed or not isinstance(error, (CollectiveError, RemoteRankError)):
                self._break_off(f"{call.text} failed with {type(error).__name__}: {error}")
            raise
        except BaseException as error:
            self._break_off(f"{call.text} was ended by {type(error).__name__}")
            raise

    def agree(self, call: Call, message: bytes = b"", *, timeout: float | None = None) -> list[bytes] | None:
        """Wait until every member is here, and calls the same.

        Returns:
            Every member's message, where frames can carry it; None in larger groups.

        Raises:
            MismatchError: They do not.
            RemoteRankError: A member failed before it could take part.
            CollectiveError: A member is gone, or did not come in time.
        """
        return self._agree(call, [message] * self.size, timeout=timeout)

    def exchange(self, call: Call, message: bytes) -> list[bytes]:
        """Agree, and return every member's message, in the members' order; they may differ in length."""
        messages = self.agree(call, message)
        return self.messages(message) if messages is None else messages

    def collect(self, call: Call, message: bytes, dst: int) -> list[bytes] | None:
        """Agree, and return every member's message on the one at place `dst`."""
        me = self.require_member()
        messages = self._agree(call, [message if place == dst else b"" for place in range(self.size)])
        if messages is not None:
            return messages if me == dst else None
        if me != dst:
            self._send(message, dst)
            return None
        return [message if place == me else self._receive(place) for place in range(self.size)]

    def announce(self, call: Call, message: bytes, src: int) -> bytes:
        """Agree, and return the message of the member at place `src`; the others' are not looked at."""
        me = self.require_member()
        messages = self._agree(call, [message if me == src else b""] * self.size)
        if messages is not None:
            return messages[src]
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self.control)
        self._broadcast(length, src)
        data = to_tensor(message) if me == src else torch.empty(_number(length), dtype=torch.uint8, device="cpu")
        data = data.to(self.control)
        self._broadcast(data, src)
        return contents(data)

    def deliver(self, call: Call, messages: Sequence[bytes], src: int) -> bytes:
        """Agree, and return the message that the member at place `src` has for this one."""
        me = self.require_member()
        delivered = self._agree(call, messages if me == src else [b""] * self.size)
        if delivered is not None:
            return delivered[src]
        if me != src:
            return self._receive(src)
        for place, message in enumerate(messages):
            if place != me:
                self._send(message, place)
        return messages[me]

    def messages(self, message: bytes) -> list[bytes]:
        """Return every member's message, in the members' order, without agreeing first."""
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self.control)
        lengths = [_number(other) for other in self._all_gather(length)]
        padded = self._all_gather(to_tensor(message.ljust(max(lengths), b"\0")).to(self.control))
        return [contents(data)[:length] for data, length in zip(padded, lengths, strict=True)]

    def place_of(self, global_rank: int, name: str) -> int:
        """Return a member's place, given its global rank.

        Raises:
            InvalidArgumentError: It is not a member; `name` names the argument in the message.
        """
        with suppress(TypeError, ValueError):
            if not isinstance(global_rank, bool):
                return self.ranks.index(operator.index(global_rank))
        shown = f"ranks 0 to {self.size - 1}" if isinstance(self.ranks, range) else f"ranks {list(self.ranks)}"
        raise InvalidArgumentError(f"{name}={global_rank!r} is not a member: the group has {shown}")

    def require_member(self) -> int:
        """Return this process's place among the members.

        Raises:
            NotJoinedError: The session that the members talked in is closed, or another process's.
            InvalidArgumentError: It is not a member.
        """
        if self._pid != os.getpid() and self.rank is not None:
            raise NotJoinedError.forked(self.ranks[self.rank])
        if self.closed:
            raise NotJoinedError("the session of this group is closed; call rankwise.init(), and make the group anew")
        if self.rank is None:
            raise InvalidArgumentError(f"this rank is not a member of the group of ranks {list(self.ranks)}")
        return self.rank

    def gone(self, ranks: Container[int] | None = None) -> str:  # noqa: ARG002 - for whom there are others
        """Return which of these members, or of all, are known to be gone, and why; "" if none is. Does not wait."""
        return ""

    def interrupted_by(self, rank: int) -> bool:  # noqa: ARG002 - for whom there are others
        """Return whether a rank calls something here that this one has not called. Does not wait."""
        return False

    def board(self) -> Store | None:
        """Return where the members leave notes for each other; None if there is nobody to read them."""
        return None

    def _agree(self, call: Call, messages: Sequence[bytes], *, timeout: float | None = None) -> list[bytes] | None:
        """Tell every member what this one calls, with a message for each, and hear theirs.

        Returns:
            What the members had to say to this one; None where there are too many of them for that.
        """
        me = self.require_member()
        call.agreeing = True
        if self.size == 1:
            received: list[bytes] | None = [messages[me]]
        elif self.framed:
            received = self._agree_by_frames(call, messages, timeout=timeout)
        else:
            received = None
            self._agree_by_digest(call)
        call.agreed = True
        return received

    def _agree_by_frames(self, call: Call, messages: Sequence[bytes], *, timeout: float | None) -> list[bytes]:
        frames = self._swap(call.frame(), messages, timeout)
        problem = verdict(self.ranks, frames)
        if problem is None and any(frame.digest != frames[0].digest for frame in frames.values()):
            details = [pickle.dumps(Details.of(call))] * self.size
            answers = self._swap(call.frame(Kind.DETAILS), details, timeout)
            problem = mismatch(self.ranks, [pickle.loads(answers[place].body) for place in range(self.size)])
        if problem is not None:
            raise problem
        return [frames[place].body for place in range(self.size)]

    def _agree_by_digest(self, call: Call, error: Exception | None = None) -> None:
        words = _WORDS.unpack(call.digest() if error is None else secrets.token_bytes(_WORDS.size))
        seen = torch.tensor([*words, *(~word for word in words)], device=self.control)
        self._all_reduce(seen, Op.MIN)  # of a word and its complement: so both its least and its greatest are known
        first, second, not_first, not_second = seen.tolist()
        if (first, second) != (~not_first, ~not_second):
            answers = self.messages(pickle.dumps(Details.of(call, error)))
            raise mismatch(self.ranks, [pickle.loads(answer) for answer in answers])

    def _tell_failure(self, call: Call, error: Exception) -> None:
        """Let the others hear why this rank cannot take part. In frames that waits for nobody."""
        call.agreeing = True
        if self.size == 1:
            return
        if self.framed:
            self._say(call.frame(Kind.FAILED, pickle.dumps(Failure.of(error, call.text))))
        else:
            with suppress(CollectiveError, RemoteRankError):
                self._agree_by_digest(call, error)

    def _send(self, message: bytes, place: int) -> None:
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self.control)
        data = to_tensor(message).to(self.control)
        self._transfer([(length, place)], [])
        if message:
            self._transfer([(data, place)], [])

    def _receive(self, place: int) -> bytes:
        length = torch.empty(_LENGTH_BYTES, dtype=torch.uint8, device=self.control)
        self._transfer([], [(length, place)])
        data = torch.empty(_number(length), dtype=torch.uint8, device=self.control)
        if data.numel():
            self._transfer([], [(data, place)])
        return contents(data)

    def _break_off(self, reason: str) -> None:
        """Leave the group for good, since the others' next step and this rank's are no longer the same."""
        self._broken = self._broken or reason

    @abstractmethod
    def _swap(self, frame: Frame, bodies: Sequence[bytes], timeout: float | None) -> Mapping[int, Frame]:
        """Send a frame to every member, with the body for its place, and return theirs and this one's by place.

        Some may be left out if one of them tells of a failure.
        """

    @abstractmethod
    def _say(self, frame: Frame) -> None:
        """Take part in the next swap with a frame, without waiting for the others'."""

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce a contiguous tensor in place."""

    @abstractmethod
    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
        """Return the reduction of this rank's piece, as a new tensor; all are flat and of one length."""

    @abstractmethod
    def _all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Gather flat uint8 tensors of one length, as new ones."""

    @abstractmethod
    def _broadcast(self, data: torch.Tensor, src: int) -> None: ...

    @abstractmethod
    def _transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> None: ...


def _number(length: torch.Tensor) -> int:
    return int.from_bytes(contents(length), "little")
