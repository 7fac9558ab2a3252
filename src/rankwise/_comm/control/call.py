"""Call: one collective on this rank, from its first check to the end of its data.

A call is a block with three steps: everything that can fail on one rank alone, then an agreement of the members
(`verify`, or a message), then the data. So the other members learn of a failed rank in the agreement, and no member
waits for data that will not come. Allocating memory can fail on one rank, so each operation on data allocates all of
its memory first, and returns a `Move` that only sends and receives. Where sizes are not known before the agreement,
a second agreement follows the allocation: `run_prepared`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from types import TracebackType
from typing import Final, NoReturn, Self, TypeAlias, cast

import torch

from rankwise._comm.buffers import no_memory_error
from rankwise._comm.control.control import Control
from rankwise._comm.control.protocol import Description, remote_error
from rankwise._comm.control.verdict import Combine, Verdict
from rankwise._restricted_pickles import plain_loads
from rankwise._torch import dispatch_mode_counter, makes_fake_tensors
from rankwise._user_frames import strip_internal_frames
from rankwise.errors import CollectiveError, RankwiseError

# A data operation that has all of its memory, that of its results too, and has not run yet.
Move: TypeAlias = Callable[[], None]

_num_dispatch_modes: Final = dispatch_mode_counter()


class Stage(Enum):
    """What the other members know of a call, and so what they have to hear of an error of this rank."""

    LOCAL = auto()  # nothing: an error of this rank takes the place of its call in the agreement
    SENT = auto()  # that this rank makes it: they may wait for its data, so that an error ends its part in the group
    FAILED_EVERYWHERE = auto()  # that the calls differ, or that members are missing: all of them raise


class Call(Description):
    """A collective of this rank, made by `Comm.call`; a context manager, in whose block the rank takes part.

    An exception before the agreement is raised on all members: the original here, `RemoteRankError` on the others.
    After the agreement the others wait for data, so an exception makes this rank leave the group permanently.

    The messages of its methods have at most a few kilobytes. Each method verifies the call, and raises as `verify`.
    """

    __slots__ = ("_control", "_stage")

    def __init__(
        self,
        control: Control,
        operation: str,
        settings: Mapping[str, object] | None = None,
        *,
        content: str = "",
        site: str = "",
    ) -> None:
        self._control = control
        self._stage = Stage.LOCAL
        self.operation = operation
        self.settings = {} if settings is None else settings
        self.content = content
        self.parts = dict
        self.is_data = False
        self.site = site
        self.main = True
        self.nested_call_refused = False
        self.before = ""

    @property
    def rank(self) -> int:
        """The group rank of this process, which is a member."""
        return cast(int, self._control.rank)

    def __enter__(self) -> Self:
        """Begin the call.

        Raises:
            NotJoinedError: The session of the group is closed.
            InvalidArgumentError: This rank is not a member, or the group is closed.
            PayloadTypeError: Under FakeTensorMode there is no memory for messages.
            CollectiveError: This rank has left the group, or is in another collective of it.
        """
        control = self._control
        # The usual case of `require_member`, in less time.
        if control.closed or control.pid != os.getpid() or control.rank is None:
            control.require_member()
        try:
            control.turns.acquire(self)
            if control.broken_reason:
                text = f"{self.text}: this group cannot be used any more: {control.broken_reason}"
                raise CollectiveError(text)  # noqa: TRY301 - every error ends the turn
            if not control.is_connected:
                control.connect()
            if _num_dispatch_modes() and makes_fake_tensors():
                error = no_memory_error(self.operation)
                self._fail(error)
                raise error  # noqa: TRY301
        except BaseException:  # also KeyboardInterrupt
            control.turns.cancel(self)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                strip_internal_frames(traceback, error)
                self._fail(error)
        finally:
            self._control.turns.release()

    def verify(self, *, timeout: float | None = None) -> None:
        """Wait until every member has made the same call.

        Args:
            timeout: Seconds to wait for the others; that of the session by default.

        Raises:
            MismatchError: The calls differ.
            RemoteRankError: A member failed before it could take part.
            CollectiveError: A member is gone, or did not come in time.
        """
        self.agree(timeout=timeout)

    def verify_tensor(self, tensor: torch.Tensor) -> None:
        """Verify a call whose only value is a tensor.

        On an accelerator this rank does not wait for the others with the session's `check=False`. The call is then
        compared together with the next one that is verified.
        """
        if tensor.device.type == "cpu" or self._control.checks_tensors:
            self.verify()
        else:
            self._control.add_unverified(self)

    def agree(
        self,
        message: bytes = b"",
        *,
        combine: Combine | None = None,
        read: Collection[int] = (),
        timeout: float | None = None,
    ) -> Verdict:
        """Verify the call, and exchange messages.

        Args:
            message: The message of this member.
            combine: Computes the result from the messages of all members. Its error is raised on all of them.
            read: The group ranks whose messages this member needs.
            timeout: As for `verify`.

        Returns:
            The result, and the messages to read.
        """
        self._stage = Stage.SENT
        if self._control.unverified.number:
            self.before = self._control.unverified.take()
        try:
            verdict = self._control.agree(self, message, combine, read, timeout)
            if verdict.error is not None:
                raise verdict.error
        except RankwiseError:
            # All members know of this error, unless it came out of a signal handler that began a nested call here.
            if not self.nested_call_refused:
                self._stage = Stage.FAILED_EVERYWHERE
            raise
        return verdict

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return the message of every member, by group rank; the lengths may differ."""
        members = range(self._control.size)
        verdict = self.agree(message, read=members)
        return [verdict.bodies[member] for member in members]

    def reduce(self, message: bytes, combine: Combine) -> bytes:
        """Return the combination of all messages, computed by one member."""
        return self.agree(message, combine=combine).result

    def gather(self, message: bytes, dst: int, combine: Combine | None = None) -> tuple[list[bytes], bytes]:
        """Return the message of every member on group rank `dst`, none on the others; and what `reduce` returns."""
        members = range(self._control.size)
        verdict = self.agree(message, combine=combine, read=members if self.rank == dst else ())
        return [verdict.bodies[member] for member in members] if self.rank == dst else [], verdict.result

    def broadcast(self, message: bytes, src: int) -> bytes:
        """Return the message of group rank `src`; that of the others is ignored."""
        return self.agree(message if self.rank == src else b"", read=(src,)).bodies[src]

    def scatter(self, messages: Sequence[bytes], src: int) -> bytes:
        """Return the message of group rank `src` to this member."""
        verdict = self.agree(pickle.dumps(list(messages)) if self.rank == src else b"", read=(src,))
        message: bytes = plain_loads(verdict.bodies[src])[self.rank]
        return message

    def begin_data(self) -> None:
        """Begin the agreement about the data of this call, after that on the call."""
        self._stage = Stage.LOCAL
        self.is_data = True
        self.content, self.parts, self.before = "", dict, ""
        self.nested_call_refused = False

    def run_prepared(self, prepare: Callable[[], Move]) -> None:
        """Run an operation on data whose size was not known before the agreement on the call.

        Collective over the members, after that agreement and in the same block: no other call can begin before it.
        `prepare` allocates the memory; its exception is raised on all members.
        """
        self.begin_data()
        move = prepare()
        self.verify()
        move()

    def fail_everywhere(self, error: Exception) -> NoReturn:
        """Raise an error that every member finds for itself in the messages of all, after an agreement."""
        self._stage = Stage.FAILED_EVERYWHERE
        raise error

    def _fail(self, error: BaseException) -> None:
        """Keep the other members from waiting for this rank, whose part of the call has failed."""
        if not isinstance(error, Exception):  # KeyboardInterrupt: the agreement may be half done
            self._control.leave_for_good(f"{self.text} was ended by {type(error).__name__}")
        elif self._stage is Stage.LOCAL:
            self._stage = Stage.SENT
            if self._control.size > 1:
                own = self._control.ranks[self._control.require_member()]
                self._control.report(self, remote_error(error, own, self.text))
        elif self._stage is Stage.SENT:
            self._control.leave_for_good(f"{self.text} failed with {type(error).__name__}: {error}")
