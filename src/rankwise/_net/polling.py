"""Waiting for descriptors: the only module that imports `select`.

`poll` and `wait_readable` wait once, for descriptors that the caller lists for that wait. An `EventLoop` is for
descriptors that stay registered from one wait to the next, each with a callback; `SharedEventLoop` is one that several
threads use.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from io import RawIOBase
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
Descriptor: TypeAlias = int | socket.socket | RawIOBase

READABLE: Final = select.POLLIN
# The other end has closed a connection, of which nothing is read; where there is no such event, errors alone.
_CLOSED: Final = getattr(select, "POLLRDHUP", 0)
WRITABLE: Final = select.POLLOUT
# A write of at most this size to a pipe is atomic: `poll` reports the pipe as writable when it has room for it.
ATOMIC_WRITE_BYTES: Final = select.PIPE_BUF


def poll(events: Mapping[int, int], seconds: float | None = None) -> list[tuple[int, int]]:
    """Wait until one of several descriptors is ready, and return those that are, with their events.

    A closed or broken connection is ready for any events, with POLLHUP or POLLERR.

    Args:
        events: READABLE, WRITABLE or both, for each descriptor.
        seconds: The longest wait; None for no limit.
    """
    # A new object for each wait: cheaper than to keep one up to date where the events change from wait to wait.
    poller = select.poll()
    for descriptor, wanted in events.items():
        poller.register(descriptor, wanted)
    return poller.poll(None if seconds is None else seconds * 1000)


def wait_readable(descriptors: Mapping[T, Descriptor], seconds: float | None = None) -> list[T]:
    """Wait until one of several descriptors can be read or is closed, and return the keys of those.

    Args:
        descriptors: The descriptors, by any key.
        seconds: The longest wait; None for no limit.
    """
    keys = {_number(each): key for key, each in descriptors.items()}
    return [keys[number] for number, _ in poll(dict.fromkeys(keys, READABLE), seconds)]


def _number(descriptor: Descriptor) -> int:
    return descriptor if isinstance(descriptor, int) else descriptor.fileno()


class EventLoop:
    """Registered descriptors, each with the functions to call when it is ready."""

    def __init__(self) -> None:
        # epoll, where it exists: the cost of a wait does not grow with the number of descriptors.
        self._poller = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._units_per_second = 1 if hasattr(select, "epoll") else 1000
        self._callbacks: dict[int, tuple[Callable[[], object] | None, Callable[[], object] | None]] = {}

    def register(
        self,
        descriptor: Descriptor,
        on_readable: Callable[[], object] | None,
        on_writable: Callable[[], object] | None = None,
    ) -> None:
        """Call functions whenever a descriptor is ready, in place of those that it was registered with before.

        Args:
            descriptor: The descriptor; it has to stay open until it is unregistered.
            on_readable: Called when it can be read, or is closed at the other end; None to not wait for that.
            on_writable: Called when it can be written; None to not wait for that.
        """
        number = _number(descriptor)
        events = (0 if on_readable is None else READABLE) | (0 if on_writable is None else WRITABLE)
        (self._poller.modify if number in self._callbacks else self._poller.register)(number, events)
        self._callbacks[number] = on_readable, on_writable

    def register_end(self, connection: Descriptor, on_end: Callable[[], object]) -> None:
        """Call a function whenever a connection is closed at the other end, or broken; others may read and write it."""
        number = _number(connection)
        self._poller.register(number, _CLOSED)
        self._callbacks[number] = on_end, None

    def register_wakeups(self, descriptor: Descriptor) -> None:
        """Return from a wait after each write to an eventfd, which is never read; only where there is epoll."""
        number = _number(descriptor)
        self._poller.register(number, select.EPOLLIN | select.EPOLLET)
        self._callbacks[number] = None, None

    def unregister(self, descriptor: Descriptor) -> None:
        """Wait for a descriptor no longer."""
        number = _number(descriptor)
        del self._callbacks[number]
        self._poller.unregister(number)

    def fileno(self) -> int:
        """Return a descriptor that can be read while a registered one is ready; only where there is epoll."""
        number: int = self._poller.fileno()  # type: ignore[union-attr]  # poll has none
        return number

    def run_once(self, seconds: float) -> bool:
        """Wait until a descriptor is ready, call its functions, and return whether one was within that time."""
        try:
            ready = self._poller.poll(max(0.0, seconds) * self._units_per_second)
        except OSError as error:
            if error.errno:
                raise
            ready = []  # a signal came, and its handler in C (faulthandler's) has changed errno
        for number, events in ready:
            # A callback may unregister another descriptor that is ready.
            on_readable, on_writable = self._callbacks.get(number, (None, None))
            if events & ~READABLE and on_writable is not None:
                on_writable()
            if events & ~WRITABLE and on_readable is not None:
                on_readable()
        return bool(ready)

    def run_until(self, condition: Callable[[], bool], deadline: float | Callable[[], float]) -> bool:
        """Run until a condition holds; return False if it does not by the deadline.

        Args:
            condition: Evaluated before the first wait and after each.
            deadline: The time on the monotonic clock, or a function that returns it, if callbacks may change it.
        """
        while not condition():
            left = (deadline if isinstance(deadline, (int, float)) else deadline()) - time.monotonic()
            if left <= 0:
                return False
            self.run_once(left)
        return True

    def close(self) -> None:
        """Wait for nothing any more. The descriptors stay open."""
        self._callbacks.clear()
        if hasattr(self._poller, "close"):
            self._poller.close()


class SharedEventLoop(EventLoop):
    """An event loop for several threads: one of them polls and calls the callbacks, for all of them.

    A thread that waits for a state calls `wait` until the state is reached. What another thread polls, and handles, may
    be what it waits for: so `wait` returns after each event, whichever thread has handled it.

    Attributes:
        num_events: The number of polls that have found an event, and of interrupts. A thread reads it before it looks
            at the state that it waits for: an event that is handled after that look ends its next `wait` at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_events = 0
        # Reentrant: a signal handler that runs during a poll may wait in the same thread.
        self._polling = threading.RLock()
        self._counting = threading.RLock()
        self._event = threading.Condition(self._counting)
        self._num_waiting = 0
        self._interrupted, self._interrupter = socket.socketpair()
        self._interrupted.setblocking(False)
        self._interrupter.setblocking(False)
        self.register(self._interrupted, partial(self._interrupted.recv, 1 << 12))

    # Leader and followers. Several threads may wait, each for a state of its own, and one epoll set has all
    # descriptors. The thread that gets `_polling` polls, and runs the callbacks for all; the others sleep in `_event`.
    # The case that makes it hard: the polling thread handles the event that another thread needs, finds its own state
    # reached, and leaves. Somebody has to poll next, and the other thread has to look at its state again.
    #
    # So the polling thread counts the event, releases `_polling`, and notifies all sleepers: each returns, looks at its
    # state, and comes back if it has to; the first one back polls. A thread that goes to sleep just then could miss the
    # notification. It counts itself in `_num_waiting` first, and tries `_polling` once more: the thread that releases
    # the lock reads the count after that. Either it finds the sleeper, or the sleeper finds the lock free.
    #
    # `seen` closes the last gap, between a look at the state and the wait: the caller reads `num_events` before it
    # looks, and a count that has changed since ends the wait at once. An event may be counted that is not the caller's:
    # it then looks once for nothing.
    def wait(self, seen: int, seconds: float) -> bool:
        """Wait until an event has been handled since `num_events` was `seen`; False if none was within that time."""
        if not self._polling.acquire(blocking=False):
            with self._event:
                self._num_waiting += 1
                try:
                    # The polling thread counts the waiting ones after it has released the lock: either it finds this
                    # one, and notifies it, or this one finds the lock released.
                    if not self._polling.acquire(blocking=False):
                        return self.num_events != seen or self._event.wait(seconds)
                finally:
                    self._num_waiting -= 1
        try:
            if self.run_once(0.0 if self.num_events != seen else seconds):
                with self._counting:
                    self.num_events += 1
        finally:
            self._polling.release()
            if self._num_waiting:
                self._notify_all()
        return self.num_events != seen

    def interrupt(self) -> None:
        """End the waits of all threads, after a state has changed for which they may wait."""
        with self._counting:
            self.num_events += 1
        self._notify_all()
        if self._polling.acquire(blocking=False):  # no other thread polls
            self._polling.release()
            self._notify_all()
        else:
            with suppress(BlockingIOError):
                self._interrupter.send(b"\0")

    def close(self) -> None:
        super().close()
        self._interrupted.close()
        self._interrupter.close()

    def _notify_all(self) -> None:
        """End the waits of the threads that do not poll: one of them polls next."""
        with self._event:
            self._event.notify_all()
