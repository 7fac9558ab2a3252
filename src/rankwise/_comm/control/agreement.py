"""Some ranks that can agree: on who takes part, and on what they do next.

A collective is one `collective` block: what it needs of this rank alone, then `verify` or a message, which tells that
all ranks do the same, then data. So a rank that fails in its own part is heard of before anybody waits for its data.
What can fail on one rank comes before an agreement, all memory for the data included: operations on data are prepared
first, as a `Prepared`. Where sizes are not known before the ranks have agreed, they agree once more: `run_prepared`.
"""

from __future__ import annotations

import os
import pickle
import secrets
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import torch
from torch.distributed import Store

from rankwise._arguments import as_integer
from rankwise._comm.buffers import require_memory_of_new
from rankwise._comm.control.call_guard import CallGuard
from rankwise._comm.control.protocol import Call, Details, Failure, Frame, FrameKind, mismatch, verdict
from rankwise._comm.reduce_ops import Op
from rankwise._user_frames import strip_internal_frames
from rankwise.errors import (
    CollectiveError,
    InvalidArgumentError,
    NotJoinedError,
    RemoteRankError,
    shown,
)

T = TypeVar("T")

# An operation that has all the memory it needs, and is yet to be done.
Prepared = Callable[[], T]
# What is left to do when the collective is over, for it takes memory: others no longer wait for this rank.
Completion = Callable[[], T]

# In groups of so many, every member sends its frame to every other. In larger ones they reduce their digests.
MAX_MESH_SIZE: Final = 64

_WORDS: Final = struct.Struct("<2q")


class ControlPlane(ABC):
    """Some ranks of a world, in an order.

    Attributes:
        ranks: Their global ranks. Their order is the order of gathered results.
        size: How many there are.
        rank: This process's place among them, or None if it is not one.
        control_device: The device that messages travel on that do not travel in frames.
        uses_mesh: Every member sends its frame to every other.
        closed: The group is closed, or the session that they talked in.
        closed_before_session: The group is closed, and was before its session.
        num_exclusive_sections: How often one of them worked while the others waited.
    """

    def __init__(self, *, ranks: Sequence[int], global_rank: int, control_device: torch.device) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(global_rank) if global_rank in ranks else None
        self.control_device = control_device
        self.uses_mesh = self.size <= MAX_MESH_SIZE
        self.closed = False
        self.closed_before_session = False
        self.num_exclusive_sections = 0
        self._children: weakref.WeakSet[ControlPlane] = weakref.WeakSet()
        self._broken = ""
        self._guard = CallGuard()
        self._pid = os.getpid()

    def shutdown(self, reason: str) -> None:
        """Let go of what the members talked over, and of the groups that go with this one; tell the others why."""
        self.closed = True
        for child in list(self._children):
            child.shutdown(reason)
        self._children.clear()

    def add_child(self, child: ControlPlane) -> None:
        """Close a group of some of these members when this one is closed, if anybody has it still."""
        self._children.add(child)
        child._guard.outer = self._guard

    def close_locally(self, reason: str) -> None:
        """As `shutdown`, of a group that is closed before its session; gives back what was opened for it alone."""
        self.closed_before_session = True
        self.shutdown(reason)

    @contextmanager
    def collective(self, call: Call) -> Iterator[int]:
        """Take part in a collective; gives this rank's place.

        What is raised before the members agreed is raised on all of them: the original here, `RemoteRankError` on the
        others. What is raised after that would leave them waiting for data: so this rank leaves the group for good.

        Raises:
            NotJoinedError: The session that the members talked in is closed.
            InvalidArgumentError: This rank is not a member, or the group is closed.
            PayloadTypeError: Under FakeTensorMode there is no memory for what ranks tell each other.
            CollectiveError: It has left the group, or is in another collective of it.
        """
        place = self.require_member()
        self._guard.acquire(call)
        try:
            if self._broken:
                raise CollectiveError(f"{call.text}: this group cannot be used any more: {self._broken}")
            try:
                require_memory_of_new(call.operation)
                yield place
            except BaseException as error:
                if error.__traceback__ is not None:  # its first entry is of this function, and goes
                    strip_internal_frames(error.__traceback__.tb_next, error)
                self._end(call, error)
                raise
        finally:
            self._guard.release()

    def run_prepared(self, call: Call, prepare: Callable[[], Prepared[T]]) -> T:
        """Move data whose size was not known before the members agreed on a call: `prepare` makes room for it.

        Collective over the members, after the agreement. What `prepare` raises is raised on all of them.
        """
        data = Call(call.operation, call.settings, is_data=True)
        with self.collective(data):
            run = prepare()
            self.verify(data)
            return run()

    def verify(self, call: Call, message: bytes = b"", *, timeout: float | None = None) -> list[bytes] | None:
        """Wait until every member is here, and calls the same.

        Returns:
            Every member's message, where frames can carry it; None in larger groups.

        Raises:
            MismatchError: They do not.
            RemoteRankError: A member failed before it could take part.
            CollectiveError: A member is gone, or did not come in time.
        """
        return self._verify(call, [message] * self.size, timeout=timeout)

    def group_rank_of(self, global_rank: int, name: str) -> int:
        """Return a member's place, given its global rank.

        Raises:
            InvalidArgumentError: It is not a member, or no integer; `name` names the argument in the message.
        """
        rank = as_integer(global_rank, name)
        if rank in self.ranks:
            return self.ranks.index(rank)
        members = f"ranks 0 to {self.size - 1}" if isinstance(self.ranks, range) else f"ranks {list(self.ranks)}"
        raise InvalidArgumentError(f"{name}={shown(rank)} is not a member: the group has {members}")

    def require_member(self) -> int:
        """Return this process's place among the members.

        Raises:
            NotJoinedError: The session that the members talked in is closed, or another process's.
            InvalidArgumentError: It is not a member, or the group is closed.
        """
        if self._pid != os.getpid() and self.rank is not None:
            raise NotJoinedError.forked(self.ranks[self.rank])
        if self.closed_before_session:
            raise InvalidArgumentError("this group is closed; make another, with rankwise.new_group(ranks)")
        if self.closed:
            raise NotJoinedError("the session of this group is closed; call rankwise.init(), and make the group anew")
        if self.rank is None:
            raise InvalidArgumentError(f"this rank is not a member of the group of ranks {list(self.ranks)}")
        return self.rank

    def dead_ranks(self, ranks: Container[int] | None = None) -> str:  # noqa: ARG002 - for whom there are others
        """Return which of these members, or of all, are known to be gone, and why; "" if none is. Does not wait."""
        return ""

    def pending_call_from(self, rank: int) -> bool:  # noqa: ARG002 - for whom there are others
        """Return whether a rank calls something here that this one has not called. Does not wait."""
        return False

    def block_collectives(self, call: Call) -> CallGuard:
        """Begin a block in which no collective of the session can begin; its end is to `shutdown` what this returns."""
        return self._guard.block_collectives(call)

    def shared_store(self) -> Store | None:
        """Return where the members leave notes for each other; None if there is nobody to read them."""
        return None

    def _verify(self, call: Call, messages: Sequence[bytes], *, timeout: float | None = None) -> list[bytes] | None:
        """Tell every member what this one calls, with a message for each, and hear theirs.

        Returns:
            What the members had to say to this one; None where there are too many of them for that.
        """
        me = self.require_member()
        call.agreeing = True
        if self.size == 1:
            return [messages[me]]
        try:
            if self.uses_mesh:
                return self._agree_by_frames(call, messages, timeout=timeout)
            self._agree_by_digest(call)
        except (CollectiveError, RemoteRankError):
            call.refused = not call.disturbed
            raise
        return None

    def _agree_by_frames(self, call: Call, messages: Sequence[bytes], *, timeout: float | None) -> list[bytes]:
        frames = self._exchange_frames(call.frame(), messages, timeout)
        problem = verdict(self.ranks, frames)
        if problem is None and any(frame.digest != frames[0].digest for frame in frames.values()):
            details = [pickle.dumps(Details.of(call))] * self.size
            answers = self._exchange_frames(call.frame(FrameKind.DETAILS), details, timeout)
            problem = mismatch(self.ranks, [pickle.loads(answers[place].body) for place in range(self.size)])
        if problem is not None:
            raise problem
        return [frames[place].body for place in range(self.size)]

    def _agree_by_digest(self, call: Call, error: Exception | None = None) -> None:
        words = _WORDS.unpack(call.digest() if error is None else secrets.token_bytes(_WORDS.size))
        seen = torch.tensor([*words, *(~word for word in words)], device=self.control_device)
        self._all_reduce(seen, Op.MIN)()  # of a word and its complement: so both its least and its greatest are known
        first, second, not_first, not_second = seen.tolist()
        if (first, second) != (~not_first, ~not_second):
            answers = self.all_gather_unverified(pickle.dumps(Details.of(call, error)))
            raise mismatch(self.ranks, [pickle.loads(answer) for answer in answers])

    def _end(self, call: Call, error: BaseException) -> None:
        """Do what the others need, now that this rank's part has ended in an error."""
        if not isinstance(error, Exception):
            self._break_off(f"{call.text} was ended by {type(error).__name__}")
        elif not call.agreeing:
            self._tell_failure(call, error)
        elif not call.refused:
            self._break_off(f"{call.text} failed with {type(error).__name__}: {error}")

    def _tell_failure(self, call: Call, error: Exception) -> None:
        """Let the others hear why this rank cannot take part. In frames that waits for nobody."""
        call.agreeing = True
        if self.size == 1:
            return
        if self.uses_mesh:
            self._post_frame(call.frame(FrameKind.FAILED, pickle.dumps(Failure.of(error, call.text))))
        else:
            with suppress(CollectiveError, RemoteRankError):
                self._agree_by_digest(call, error)

    def _break_off(self, reason: str) -> None:
        """Leave the group for good, since the others' next step and this rank's are no longer the same."""
        self._broken = self._broken or reason

    @abstractmethod
    def _exchange_frames(self, frame: Frame, bodies: Sequence[bytes], timeout: float | None) -> Mapping[int, Frame]:
        """Send a frame to every member, with the body for its place, and return theirs and this one's by place.

        Some may be left out if one of them tells of a failure.
        """

    @abstractmethod
    def _post_frame(self, frame: Frame) -> None:
        """Take part in the next swap with a frame, without waiting for the others'."""

    @abstractmethod
    def all_gather_unverified(self, message: bytes) -> list[bytes]:
        """Return every member's message, in the members' order, without agreeing first."""

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Prepared[None]:
        """Prepare to reduce a contiguous tensor in place.

        This and those below take memory, and raise what this rank alone has to raise; what they return only moves data.
        """

    @abstractmethod
    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Op) -> Prepared[torch.Tensor]:
        """Prepare the reduction of this rank's piece, as a new tensor; all are flat and of one length."""

    @abstractmethod
    def _all_gather(self, data: torch.Tensor) -> Prepared[list[torch.Tensor]]:
        """Prepare to gather flat uint8 tensors of one length, as new ones."""

    @abstractmethod
    def _broadcast(self, data: torch.Tensor, src: int) -> Prepared[None]: ...

    @abstractmethod
    def _transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Prepared[None]: ...
