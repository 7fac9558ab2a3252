"""The block of a collective: it begins and ends with the guard of the group, and an exception in it is reported."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Final, Protocol, cast

from rankwise._comm.buffers import no_memory_error
from rankwise._comm.control.call_guard import CallGuard
from rankwise._comm.control.protocol import Call
from rankwise._torch import dispatch_mode_counter, makes_fake_tensors
from rankwise._user_frames import strip_internal_frames
from rankwise.errors import CollectiveError

_num_dispatch_modes: Final = dispatch_mode_counter()


class GuardedGroup(Protocol):
    """A group, as a block needs it; see `Agreement`."""

    rank: int | None
    guard: CallGuard
    closed: bool
    broken_reason: str
    pid: int
    is_connected: bool

    def connect(self) -> None: ...

    def require_member(self) -> int: ...

    def handle_failure(self, call: Call, error: BaseException) -> None: ...


class CollectiveBlock(tuple[GuardedGroup, Call]):
    """The block of a collective, from a group and a call; see `Agreement.collective`.

    It takes less time than a generator would, and a tuple less than a class with attributes.
    """

    __slots__ = ()

    def __enter__(self) -> int:
        group, call = self
        # The usual case of `require_member`, without the call.
        if group.closed or group.pid != os.getpid() or group.rank is None:
            group.require_member()
        try:
            group.guard.acquire(call)
            if group.broken_reason:
                text = f"{call.text}: this group cannot be used any more: {group.broken_reason}"
                raise CollectiveError(text)  # noqa: TRY301 - every error releases the guard
            if not group.is_connected:
                group.connect()
            if _num_dispatch_modes() and makes_fake_tensors():
                error = no_memory_error(call.operation)
                group.handle_failure(call, error)
                raise error  # noqa: TRY301
        except BaseException:  # also KeyboardInterrupt
            group.guard.cancel(call)
            raise
        return cast(int, group.rank)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        group, call = self
        try:
            if error is not None:
                strip_internal_frames(traceback, error)
                group.handle_failure(call, error)
        finally:
            group.guard.release()
