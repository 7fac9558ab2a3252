"""Which call of a group is next on this rank.

The ranks agree on nothing but the order of the calls of a group, in which the program makes them. So a second call is
refused while one runs, in another thread or in a signal handler: it would read the frames and data of the first one,
and nothing would order the two in the same way on all ranks. The message names both call sites. The same holds during
an exclusive section, for whose end other ranks wait, as in `rank_zero_first`: no collective of any group of the session
can begin in the thread that runs the section.

Non-blocking calls run one after the other, in a thread of the group, since a collective waits for sockets and converts
values in Python. The thread ends when no call is left, so that an idle group has none.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from rankwise._comm.control.protocol import Description
from rankwise._comm.work import StartedCall, UntakenWorks, Work, WorkState
from rankwise._user_frames import call_site, frame_of_backward
from rankwise.errors import CollectiveError

T = TypeVar("T")

# The queues of this process with pending calls; and those that were used, and whose group was not closed.
_busy_queues: Final[set[WorkQueue]] = set()
_open_queues: Final[set[WorkQueue]] = set()
# The threads that are ranks themselves, beside the main thread of a process that is a rank.
rank_threads: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def is_program_of_rank() -> bool:
    """Return whether the calling thread runs a rank's program, and none of its non-blocking calls is pending.

    Torch's thread for the backward pass of an accelerator runs it too, while the main thread waits. Other threads may
    have groups of their own. So may non-blocking calls, and a rank waits in several groups then.
    """
    if _busy_queues:
        return False
    thread = threading.current_thread()
    return thread is threading.main_thread() or thread in rank_threads or frame_of_backward() is not None


class Turns:
    """The turns of the calls of one group, on this rank: one call at a time.

    Attributes:
        outer: The turns of the group that this group was made from.
    """

    def __init__(self, ranks: Sequence[int], global_rank: int, timeout: float | None) -> None:
        """Begin without a call.

        Args:
            ranks: The global ranks of the members.
            global_rank: The global rank of this process.
            timeout: Seconds to wait for non-blocking calls at the end of the program; None for no limit.
        """
        self.outer: Turns | None = None
        self._size = len(ranks)
        self._global_rank = global_rank
        self._timeout = timeout
        self._works: WorkQueue | None = None  # until the first non-blocking call
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
        site = "" if self._works is None else self._works.await_turn()
        if not self._lock.acquire(blocking=False):
            raise CollectiveError(self._refusal_text(call))
        call.site = call.site or site or call_site()
        self._thread = threading.current_thread()
        call.main = is_program_of_rank()
        self._call = call

    def start(
        self, call: Description, run: Callable[[], T], *, at_once: bool = False, convert: Callable[[T], T] | None = None
    ) -> Work[T]:
        """Make a call after those that are pending, without waiting for it; as `Comm.start`, which describes it."""
        self._check_start(call)
        if self._works is None:
            self._works = WorkQueue(f"rankwise: a group of {self._size} ranks", self._global_rank, self._timeout)
        if at_once:
            return self._works.run(call.operation, call_site(), run)
        return self._works.start(call.operation, call_site(), run, convert)

    def finish(self, seconds: float | None) -> None:
        """Wait at most so long for the non-blocking calls, and end the rest."""
        if self._works is not None:
            self._works.finish(seconds)

    def _check_start(self, call: Description) -> None:
        """Check that a non-blocking call may be made.

        Raises:
            CollectiveError: As by `acquire`.
        """
        self._refuse_in_section(call)
        # Calls of the works begin and end meanwhile: what is found about one counts only if it is still there.
        while (current := self._call) is not None:
            thread = self._thread
            by_works = self._works is not None and self._works.is_run_by(thread)
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

    def block_collectives(self, call: Description) -> Turns:
        """Begin a section without collectives in any group of the session, and return the turns to release at its end.

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


class WorkQueue:
    """The non-blocking calls of one group, on this rank."""

    def __init__(self, name: str, rank: int, timeout: float | None) -> None:
        """Make an empty queue.

        Args:
            name: The name of its thread.
            rank: The global rank of this process.
            timeout: Seconds to wait for pending calls at the end of the program; None for no limit.
        """
        self.timeout = timeout
        self._name = name
        self._rank = rank
        self._running: WorkState | None = None
        self._untaken = UntakenWorks()
        self._last: WorkState | None = None
        self._calls: deque[StartedCall[Any]] = deque()
        self._lock = threading.RLock()  # a signal handler may start a call inside of `start`

    def is_run_by(self, thread: threading.Thread) -> bool:
        """Return whether this is the thread of the queue."""
        return self._untaken.thread is thread

    def start(
        self, operation: str, site: str, run: Callable[[], T], convert: Callable[[T], T] | None = None
    ) -> Work[T]:
        """Run a call after those that are pending, and return its work at once.

        Args:
            operation: The name of the public function.
            site: The line of the program that calls it.
            run: Makes the call.
            convert: Converts the result in the thread that takes it.

        Raises:
            RuntimeError: No thread can be started. Then no call is pending.
        """
        call = StartedCall(WorkState(operation, site), run, self._untaken, self._rank, convert)
        thread = threading.Thread(target=self._run_all, daemon=True, name=self._name)
        with self._lock:
            self._calls.append(call)
            if self._untaken.thread is None:
                self._untaken.thread = thread
                _busy_queues.add(self)
                try:
                    thread.start()
                except BaseException:
                    self._untaken.thread = None
                    _busy_queues.discard(self)
                    self._calls.pop()
                    raise
            self._last = call.state
            self._untaken.add(call.state)
            _open_queues.add(self)
        return Work(call)

    def run(self, operation: str, site: str, run: Callable[[], T]) -> Work[T]:
        """Run a call in this thread, after those that are pending, and return its work, which is finished."""
        call = StartedCall(WorkState(operation, site), run, self._untaken, self._rank)
        self._untaken.add(call.state)
        _open_queues.add(self)
        call.execute()
        return Work(call)

    def await_turn(self) -> str:
        """Wait until the pending calls are finished, before a blocking one begins in this thread.

        Returns:
            In the thread of the queue, the call site of the call that it runs; otherwise "".
        """
        if self._running is not None and self.is_run_by(threading.current_thread()):
            return self._running.site
        if self._last is not None:
            self._last.wait(None)
        return ""

    def finish(self, seconds: float | None) -> None:
        """Wait for the pending calls, and log the works whose result nobody has taken.

        Calls that have not begun after so many seconds are not made. The one that runs then may take its own timeout;
        with 0 seconds, it fails when the connections of the group are closed.
        """
        if self._last is not None and seconds != 0:
            self._last.wait(seconds)
        with self._lock:
            unbegun = list(self._calls)
            self._calls.clear()
            running = self._running
        for call in unbegun:
            call.abandon("its group was closed before")
        if running is not None and seconds != 0:
            running.wait(seconds)
        _open_queues.discard(self)
        self._untaken.log_all()

    def _run_all(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._untaken.thread = self._running = None
                    _busy_queues.discard(self)
                    return
                call = self._calls.popleft()
                self._running = call.state
                self._untaken.running = self._running.text
            call.execute()
            del call  # and with it the result, if nothing else refers to it


def _finish_at_interpreter_exit() -> None:
    """Wait for pending calls, unless the program ends with an error: then the others may wait for this process."""
    failed = getattr(sys, "last_value", None) is not None
    start = time.monotonic()
    for queue in list(_open_queues):
        waited = time.monotonic() - start
        queue.finish(0 if failed else None if queue.timeout is None else max(0, queue.timeout - waited))


def _forget_in_forked_child() -> None:
    _open_queues.clear()
    _busy_queues.clear()


atexit.register(_finish_at_interpreter_exit)
if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(after_in_child=_forget_in_forked_child)
