"""Waiting for descriptors: the only module that imports `select` or `selectors`.

`poll` and `wait_readable` wait once, for descriptors that the caller lists for that wait. An `EventLoop` is for
descriptors that stay registered from one wait to the next, each with a callback.
"""

from __future__ import annotations

import select
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from io import RawIOBase
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
Descriptor: TypeAlias = int | socket.socket | RawIOBase

READABLE: Final = select.POLLIN
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
    keys = {each if isinstance(each, int) else each.fileno(): key for key, each in descriptors.items()}
    return [keys[number] for number, _ in poll(dict.fromkeys(keys, READABLE), seconds)]


class EventLoop:
    """Registered descriptors, each with the functions to call when it is ready."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def register(
        self,
        descriptor: Descriptor,
        on_readable: Callable[[], object],
        on_writable: Callable[[], object] | None = None,
    ) -> None:
        """Call functions whenever a descriptor is ready, in place of those that it was registered with before.

        Args:
            descriptor: The descriptor; it has to stay open until it is unregistered.
            on_readable: Called when it can be read, or is closed at the other end. A callback that ran just before may
                have unregistered and closed the descriptor.
            on_writable: Called when it can be written; None to not wait for that.
        """
        events = selectors.EVENT_READ | (0 if on_writable is None else selectors.EVENT_WRITE)
        is_new = descriptor not in self._selector.get_map()
        (self._selector.register if is_new else self._selector.modify)(descriptor, events, (on_readable, on_writable))

    def unregister(self, descriptor: Descriptor) -> None:
        """Wait for a descriptor no longer."""
        self._selector.unregister(descriptor)

    def run_once(self, seconds: float) -> bool:
        """Wait until a descriptor is ready, call its functions, and return whether one was within that time."""
        ready = self._selector.select(max(0.0, seconds))
        for key, events in ready:
            on_readable, on_writable = key.data
            if events & selectors.EVENT_WRITE and on_writable is not None:
                on_writable()
            if events & selectors.EVENT_READ:
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
        self._selector.close()
