"""One collective at a time in a group: what else asks to enter is refused at once, with both places in the message.

So it is during a block for whose end other ranks wait, as in `rank_zero_first`: there no collective of any group of the
session can begin in the thread that runs the block.

Threads of a rank that use one group would take each other's frames and data, and no two ranks would agree on whose
collective comes first.
"""

from __future__ import annotations

import threading

from rankwise._comm.control.protocol import Call
from rankwise._user_frames import call_site
from rankwise.errors import CollectiveError


class CallGuard:
    """Where collectives of this rank enter a group.

    Attributes:
        outer: That of the group which this one was made from.
    """

    def __init__(self) -> None:
        self.outer: CallGuard | None = None
        self._inside = threading.Lock()
        self._call: Call | None = None
        self._thread = threading.main_thread()
        self._is_reserved = False

    def acquire(self, call: Call) -> None:
        """Begin a collective.

        Raises:
            CollectiveError: This rank is in another one, in this thread or in another, or in a block that is to have
                none.
        """
        outer = self.outer
        while outer is not None:
            if outer._is_reserved and outer._thread is threading.current_thread():  # noqa: SLF001 - of its own class
                raise CollectiveError(outer._refusal(call))  # noqa: SLF001
            outer = outer.outer
        if not self._inside.acquire(blocking=False):
            raise CollectiveError(self._refusal(call))
        call.site = call.site or call_site()
        self._call, self._thread = call, threading.current_thread()

    def release(self) -> None:
        """End it."""
        self._call = None
        self._is_reserved = False
        self._inside.release()

    def block_collectives(self, call: Call) -> CallGuard:
        """Begin a block without collectives, and return the entrance to leave at its end: of the session.

        Raises:
            CollectiveError: This rank is in a collective, in this thread or in another.
        """
        if self.outer is not None:
            return self.outer.block_collectives(call)
        self.acquire(call)
        self._is_reserved = True
        return self

    def _refusal(self, call: Call) -> str:
        current, thread = self._call, self._thread
        busy = "a collective that is just beginning or ending" if current is None else current.text
        if thread is not threading.current_thread():
            return (
                f"{call.text} cannot begin in thread {threading.current_thread().name!r}: thread {thread.name!r} is in "
                f"{busy} with the same group. Call the collectives of a group one after the other, or make a group "
                "for each thread, with rankwise.new_group()"
            )
        if self._is_reserved:
            return (
                f"{call.text} cannot begin inside of the block of {busy}, for whose end other ranks wait: call it "
                "after the block"
            )
        if current is not None:
            current.disturbed = True
        return (
            f"{call.text} cannot begin inside of {busy}, with the same group in the same thread, as from a signal "
            "handler: set a flag there, and call it when that has returned"
        )
