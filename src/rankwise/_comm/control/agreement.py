"""The agreement of a group's members on every collective, before its data is sent.

A collective is one `collective` block with three steps: everything that can fail on one rank alone, then an agreement
(`verify`, or a message), then the data. So the other members learn of a failed rank in the agreement, and no member
waits for data that will not come. Allocating memory can fail on one rank, so each operation on data allocates all of
its memory first, and returns a `Prepared` that only sends and receives. Where sizes are not known before the agreement,
a second agreement follows the allocation: `run_prepared`.
"""

from __future__ import annotations

import os
import pickle
import secrets
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import torch
from torch.distributed import Store

from rankwise._arguments import as_integer
from rankwise._comm.control.call_guard import CallGuard
from rankwise._comm.control.collective_block import CollectiveBlock
from rankwise._comm.control.protocol import Call, Details, FrameKind, mismatch_error, read_report, remote_error
from rankwise._comm.control.transports import FrameExchange, MessageTransport, Prepared
from rankwise._comm.control.verdict import Combine, Verdict, combined
from rankwise._comm.reduce_ops import Op
from rankwise.errors import (
    CollectiveError,
    InvalidArgumentError,
    NotJoinedError,
    RankwiseError,
    RemoteRankError,
    shown,
)

T = TypeVar("T")

_DIGEST_WORDS: Final = struct.Struct("<2q")


class Agreement(ABC):
    """The members of a group, and their agreement on collectives.

    Attributes:
        ranks: The global ranks of the members. Their order is the order of gathered results.
        size: The number of members.
        rank: The group rank of this process; None if it is not a member.
        uses_frames: The members exchange frames; otherwise they agree through a data plane.
        is_connected: The members are connected, or need not be.
        closed: The group is closed, alone or with its session.
        closed_before_session: The group was closed alone, before its session.
        guard: Allows one collective at a time.
        pid: The process that has made the group.
        broken_reason: Why the group cannot be used any more; "" if it can.
        num_exclusive_sections: The number of exclusive sections so far, in which one member ran and the others waited.
    """

    def __init__(
        self, *, ranks: Sequence[int], global_rank: int, exchange: FrameExchange | None, transport: MessageTransport
    ) -> None:
        """Make the group of some ranks.

        Args:
            ranks: The global ranks of the members.
            global_rank: The global rank of this process.
            exchange: The exchange of frames; None if the group does not use frames, or has one member.
            transport: The data plane by which the members agree otherwise.
        """
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(global_rank) if global_rank in ranks else None
        self.uses_frames = exchange is not None or self.size == 1
        self._exchange = exchange
        self.is_connected = exchange is None
        self._transport = transport
        self.closed = False
        self.closed_before_session = False
        self.num_exclusive_sections = 0
        self._children: weakref.WeakSet[Agreement] = weakref.WeakSet()
        self.broken_reason = ""
        self.guard = CallGuard()
        self.pid = os.getpid()

    def shutdown(self, reason: str) -> None:
        """Close the connections, also those of child groups, and send the reason to the other members."""
        self.closed = True
        for child in list(self._children):
            child.shutdown(reason)
        self._children.clear()
        if self._exchange is not None:
            self._exchange.shutdown(reason)

    def add_child(self, child: Agreement) -> None:
        """Register a group of some of these members, to be closed with this one if it still exists then."""
        self._children.add(child)
        child.guard.outer = self.guard

    def close_locally(self, reason: str) -> None:
        """Shut down before the session ends, without waiting for other members, and destroy the group's resources."""
        self.closed_before_session = True
        self.shutdown(reason)

    def connect(self) -> None:
        """Connect to the other members, before the first operation chooses its data plane.

        Otherwise it would take another one than all later operations, and its results would have other bits.
        """
        if self._exchange is not None:
            self._exchange.open()
        self.is_connected = True

    def collective(self, call: Call) -> CollectiveBlock:
        """Take part in a collective, in a block; gives the group rank of this process.

        An exception before the agreement is raised on all members: the original here, `RemoteRankError` on the others.
        After the agreement the others wait for data, so an exception makes this rank leave the group permanently.

        Raises:
            NotJoinedError: The session of the group is closed.
            InvalidArgumentError: This rank is not a member, or the group is closed.
            PayloadTypeError: Under FakeTensorMode there is no memory for messages.
            CollectiveError: This rank has left the group, or is in another collective of it.
        """
        return CollectiveBlock((self, call))

    def run_prepared(self, call: Call, prepare: Callable[[], Prepared[T]]) -> T:
        """Run an operation on data whose size was not known before the agreement on a call.

        Collective over the members, in the block of that call and after its agreement: no other call can begin before
        it. `prepare` allocates the memory; its exception is raised on all members.
        """
        call.begin_data()
        run = prepare()
        self.verify(call)
        return run()

    def verify(self, call: Call, *, timeout: float | None = None) -> None:
        """Wait until every member has made the same call.

        Raises:
            MismatchError: The calls differ.
            RemoteRankError: A member failed before it could take part.
            CollectiveError: A member is gone, or did not come in time.
        """
        self.agree(call, timeout=timeout)

    def group_rank_of(self, global_rank: int, name: str) -> int:
        """Return the group rank of a member.

        Raises:
            InvalidArgumentError: `global_rank` is not a member, or not an integer; `name` is the argument's name.
        """
        rank = as_integer(global_rank, name)
        if rank in self.ranks:
            return self.ranks.index(rank)
        members = f"ranks 0 to {self.size - 1}" if isinstance(self.ranks, range) else f"ranks {list(self.ranks)}"
        raise InvalidArgumentError(f"{name}={shown(rank)} is not a member: the group has {members}")

    def require_member(self) -> int:
        """Return the group rank of this process.

        Raises:
            NotJoinedError: The session of the group is closed, or belongs to another process.
            InvalidArgumentError: This process is not a member, or the group is closed.
        """
        if self.pid != os.getpid() and self.rank is not None:
            raise NotJoinedError.forked(self.ranks[self.rank])
        if self.closed_before_session:
            raise InvalidArgumentError("this group is closed; make another, with rankwise.new_group(ranks)")
        if self.closed:
            raise NotJoinedError("the session of this group is closed; call rankwise.init(), and make the group anew")
        if self.rank is None:
            raise InvalidArgumentError(f"this rank is not a member of the group of ranks {list(self.ranks)}")
        return self.rank

    def dead_ranks(self, ranks: Container[int] | None = None) -> str:
        """Return the dead members, of `ranks` or of all, with reasons; "" if none is known. Does not wait."""
        return "" if self._exchange is None else self._exchange.dead_ranks(ranks)

    def pending_call_from(self, rank: int) -> bool:
        """Return whether a rank has made a call in this group that this rank has not made. Does not wait."""
        return self._exchange is not None and self._exchange.pending_call_from(rank)

    @property
    def sequence(self) -> int:
        """The number of the last exchange of the group that this rank has entered; 0 before the first."""
        return 0 if self._exchange is None else self._exchange.sequence

    def block_collectives(self, call: Call) -> CallGuard:
        """Begin a section in which no collective of the session can begin; release the returned guard at its end."""
        return self.guard.block_collectives(call)

    def shared_store(self) -> Store | None:
        """Return the store that the members share; None if there is no other member."""
        return None

    def agree(
        self,
        call: Call,
        message: bytes = b"",
        *,
        combine: Combine | None = None,
        read: Collection[int] = (),
        timeout: float | None = None,
    ) -> Verdict | None:
        """Check that all members make the same call, and exchange their messages.

        Args:
            call: The call of this member.
            message: Its message.
            combine: Computes the result from the messages of all members.
            read: The group ranks whose messages this member needs.
            timeout: Seconds to wait for the others.

        Returns:
            The result, and the messages to read; None in groups that do not use frames.
        """
        call.agreement_started = True
        try:
            if self.size == 1:
                verdict = combined([message], combine)
                verdict.bodies = {0: message}
            elif self._exchange is not None:
                verdict = self._exchange.agree(call, message, combine, read, timeout)
            else:
                self._verify_by_digest(call)
                return None
            if verdict.error is not None:
                raise verdict.error
        except RankwiseError:
            # All members know of this error, unless it came out of a signal handler that began a nested call here.
            call.agreement_failed = not call.nested_call_refused
            raise
        return verdict

    def _verify_by_digest(self, call: Call, failure: RemoteRankError | None = None) -> None:
        # A failed rank takes part with a random digest: the mismatch makes all members exchange details.
        words = _DIGEST_WORDS.unpack(call.digest() if failure is None else secrets.token_bytes(_DIGEST_WORDS.size))
        # The minimum of a word, and of its complement, gives the least and the greatest word in one reduction.
        least = torch.tensor([*words, *(~word for word in words)], device=self._transport.message_device)
        self._transport.all_reduce(least, Op.MIN)()
        first, second, not_first, not_second = least.tolist()
        if (first, second) != (~not_first, ~not_second):
            answers = self.all_gather_unverified(pickle.dumps(Details.of(call, failure)))
            raise mismatch_error(self.ranks, [read_report(answer) for answer in answers])

    def handle_failure(self, call: Call, error: BaseException) -> None:
        """Keep the other members from waiting for this rank, whose part of a collective has failed."""
        if not isinstance(error, Exception):  # KeyboardInterrupt: the agreement may be half done
            self._mark_broken(f"{call.text} was ended by {type(error).__name__}")
        elif not call.agreement_started:
            self._report_failure(call, error)
        elif not call.agreement_failed:
            self._mark_broken(f"{call.text} failed with {type(error).__name__}: {error}")

    def _report_failure(self, call: Call, error: Exception) -> None:
        """Send the exception of this rank to the other members. Where the group uses frames, this does not wait."""
        call.agreement_started = True
        if self.size == 1:
            return
        failure = remote_error(error, self.ranks[self.require_member()], call.text)
        if self._exchange is not None:
            self._exchange.post(call.frame(FrameKind.FAILED, pickle.dumps(failure)))
        else:
            with suppress(CollectiveError, RemoteRankError):
                self._verify_by_digest(call, failure)

    def _mark_broken(self, reason: str) -> None:
        """Leave the group permanently: the next step of this rank is no longer the next step of the others."""
        self.broken_reason = self.broken_reason or reason
        if self._exchange is not None:
            self._exchange.close(reason)

    @abstractmethod
    def all_gather_unverified(self, message: bytes) -> list[bytes]:
        """Return the message of every member, by group rank, without an agreement."""
