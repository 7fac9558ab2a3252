"""Dropping a closed process group while the next test begins."""

from __future__ import annotations

import _thread


class GroupTeardown:
    """Drops the last reference to a closed process group on a thread of its own.

    gloo closes its connections one after the other, and waits up to 10 ms for each, which is half of the time of a
    small test. The thread is not one of `threading`, so that a test that counts threads does not find it.
    """

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()  # held while the thread runs

    def begin(self, groups: list[object]) -> None:
        """Start to empty a list that has the last reference to a group; wait for the last group before."""
        self._lock.acquire()
        _thread.start_new_thread(self._empty, (groups,))

    def wait(self) -> None:
        """Wait for the thread: the interpreter must not end before it."""
        with self._lock:
            pass

    def _empty(self, groups: list[object]) -> None:
        groups.clear()
        self._lock.release()
