"""Letting go of a closed process group while the next test begins."""

from __future__ import annotations

import _thread


class GroupTeardown:
    """Drops the last reference to a closed process group on a thread of its own.

    gloo closes one connection after the other, and waits up to 10 ms for each: half of what a small test takes. The
    thread is none of `threading`'s, so that a test that counts threads does not find it.
    """

    def __init__(self) -> None:
        self._free = _thread.allocate_lock()

    def begin(self, groups: list[object]) -> None:
        """Begin to empty a list that holds a group."""
        self._free.acquire()
        _thread.start_new_thread(self._empty, (groups,))

    def wait(self) -> None:
        """Wait until all is gone: the interpreter must not end before."""
        with self._free:
            pass

    def _empty(self, groups: list[object]) -> None:
        groups.clear()
        self._free.release()
