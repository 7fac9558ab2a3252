"""The block of a collective: it begins and ends with the guard of the group, and an exception in it is reported."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rankwise._comm.buffers import no_memory_error
from rankwise._comm.control.call_guard import CallGuard
from rankwise._comm.control.protocol import Call
from rankwise._torch import makes_fake_tensors
from rankwise._user_frames import strip_internal_frames
from rankwise.errors import CollectiveError


class GuardedGroup(Protocol):
    """A group, as a block needs it; see `Agreement`."""

    guard: CallGuard
    broken_reason: str

    def require_member(self) -> int: ...

    def handle_failure(self, call: Call, error: BaseException) -> None: ...


class CollectiveBlock:
    """The block of a collective; see `Agreement.collective`. It takes less time than a generator would."""

    __slots__ = ("_call", "_group")

    def __init__(self, group: GuardedGroup, call: Call) -> None:
        self._group = group
        self._call = call

    def __enter__(self) -> int:
        group, call = self._group, self._call
        group_rank = group.require_member()
        try:
            group.guard.acquire(call)
            if group.broken_reason:
                text = f"{call.text}: this group cannot be used any more: {group.broken_reason}"
                raise CollectiveError(text)  # noqa: TRY301 - every error releases the guard
            if makes_fake_tensors():
                error = no_memory_error(call.operation)
                group.handle_failure(call, error)
                raise error  # noqa: TRY301
        except BaseException:  # also KeyboardInterrupt
            group.guard.cancel(call)
            raise
        return group_rank

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                strip_internal_frames(traceback, error)
                self._group.handle_failure(self._call, error)
        finally:
            self._group.guard.release()
