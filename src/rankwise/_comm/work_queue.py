"""The non-blocking calls of a group: one after the other, in the order in which the program makes them.

The ranks agree on nothing but that order. The calls run in a thread of the group, since a collective waits for sockets
and converts values in Python. The thread ends when no call is left, so that an idle group has none.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from rankwise._comm.work import StartedCall, UntakenWorks, Work, WorkState

T = TypeVar("T")

# The queues of this process with pending calls; and those that were used, and whose group was not closed.
busy_queues: Final[set[WorkQueue]] = set()
_open_queues: Final[set[WorkQueue]] = set()
# The threads that are ranks themselves, beside the main thread of a process that is a rank.
rank_threads: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def is_program_of_rank() -> bool:
    """Return whether the calling thread runs a rank's program, and none of its non-blocking calls is pending.

    Other threads may have groups of their own. So may non-blocking calls, and a rank waits in several groups then.
    """
    thread = threading.current_thread()
    return (thread is threading.main_thread() or thread in rank_threads) and not busy_queues


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
                busy_queues.add(self)
                try:
                    thread.start()
                except BaseException:
                    self._untaken.thread = None
                    busy_queues.discard(self)
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
                    busy_queues.discard(self)
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
    busy_queues.clear()


atexit.register(_finish_at_interpreter_exit)
os.register_at_fork(after_in_child=_forget_in_forked_child)
