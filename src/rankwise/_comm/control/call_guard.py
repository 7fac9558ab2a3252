"""One collective at a time in a group: a second call is refused at once, and the message names both call sites.

The same holds during an exclusive section, for whose end other ranks wait, as in `rank_zero_first`: no collective of
any group of the session can begin in the thread that runs the section.

Two threads of a rank in one group would read each other's frames and data, and nothing would order their collectives in
the same way on all ranks.
"""

from __future__ import annotations

import threading

from rankwise._comm.control.protocol import Description
from rankwise._comm.work_queue import WorkQueue, rank_threads
from rankwise._user_frames import call_site
from rankwise.errors import CollectiveError


class CallGuard:
    """Allows one collective of this rank at a time in a group.

    Attributes:
        outer: The guard of the group that this group was made from.
        works: The non-blocking calls of the group, before which no other call may begin; None before the first one.
    """

    def __init__(self) -> None:
        self.outer: CallGuard | None = None
        self.works: WorkQueue | None = None
        self._lock = threading.Lock()
        self._call: Description | None = None
        self._thread = threading.main_thread()
        self._blocks_collectives = False

    def acquire(self, call: Description) -> None:
        """Begin a collective.

        Raises:
            CollectiveError: This rank is in another collective, in this thread or in another, or in an exclusive
                section.
        """
        if self.outer is not None:
            self._refuse_in_section(call)
        site = "" if self.works is None else self.works.await_turn()
        if not self._lock.acquire(blocking=False):
            raise CollectiveError(self._refusal_text(call))
        call.site = call.site or site or call_site()
        self._thread = threading.current_thread()
        call.main = self._thread is threading.main_thread() or self._thread in rank_threads
        self._call = call

    def check_start(self, call: Description) -> None:
        """Check that a non-blocking call may be made.

        Raises:
            CollectiveError: As by `acquire`.
        """
        self._refuse_in_section(call)
        # Calls of the works begin and end meanwhile: what is found about one counts only if it is still there.
        while (current := self._call) is not None:
            thread = self._thread
            by_works = self.works is not None and self.works.is_run_by(thread)
            if by_works and thread is not threading.current_thread():
                return
            if self._call is current:
                raise CollectiveError(self._refusal_text(call))

    def release(self) -> None:
        """End the collective."""
        self._call = None
        self._blocks_collectives = False
        self._lock.release()

    def cancel(self, call: Description) -> None:
        """End a collective if it has begun."""
        if self._call is call:
            self.release()

    def block_collectives(self, call: Description) -> CallGuard:
        """Begin a section without collectives in any group of the session, and return the guard to release at its end.

        Raises:
            CollectiveError: This rank is in a collective, in this thread or in another.
        """
        if self.outer is not None:
            return self.outer.block_collectives(call)
        self.acquire(call)
        self._blocks_collectives = True
        return self

    def _refuse_in_section(self, call: Description) -> None:
        outer = self.outer
        while outer is not None:
            if outer._blocks_collectives and outer._thread is threading.current_thread():  # noqa: SLF001 - of its own class
                raise CollectiveError(outer._refusal_text(call))  # noqa: SLF001
            outer = outer.outer

    def _refusal_text(self, call: Description) -> str:
        current, thread = self._call, self._thread
        busy = "a collective that is just starting or ending" if current is None else current.text
        if thread is not threading.current_thread():
            return (
                f"{call.text} cannot begin in thread {threading.current_thread().name!r}: thread {thread.name!r} is in "
                f"{busy} with the same group. Call the collectives of a group one after the other, or make a group "
                "for each thread, with rankwise.new_group()"
            )
        if self._blocks_collectives:
            return (
                f"{call.text} cannot begin inside of the block of {busy}, for whose end other ranks wait: call it "
                "after the block"
            )
        if current is not None:
            current.nested_call_refused = True
        return (
            f"{call.text} cannot begin inside of {busy}, with the same group in the same thread, as from a signal "
            "handler: set a flag there, and call it when that has returned"
        )
