"""The page of a host: memory that its ranks share, and an eventfd for each of them, which wakes it up.

Where everything is in the memory: `layout`. A fence orders the words: after a rank has written a record and then,
behind a fence, its sequence number, a rank that reads that number reads that record.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from rankwise._comm.control.page.layout import (
    COUNT_WORD,
    DIRECTORY_BYTES,
    FREE,
    GROUP_WORDS,
    GROUPS_OFFSET,
    MAX_GROUPS,
    MAX_STAGING_BYTES,
    entry_word,
    staging_offset,
    window_bytes,
)
from rankwise._comm.control.page.memory import PageMemory
from rankwise._comm.control.page.window import Window
from rankwise._comm.shared_memory import SharedRange
from rankwise._net.polling import SharedEventLoop
from rankwise.errors import CollectiveError

_SPIN_SECONDS: Final = 0.0001


class HostPage:
    """This process's access to the page of its host.

    Attributes:
        ranks: The global ranks on this host, in ascending order.
        index: The index of this rank among them.
        dead: The indices of the ranks that have ended.
        shares_tensors: All ranks of this host use the page for tensors too.
        spin_seconds: How long a rank waits without sleeping before it sleeps.
    """

    def __init__(
        self, *, ranks: Sequence[int], rank: int, memory: int, wakers: Sequence[int], processes: Sequence[int]
    ) -> None:
        """Take over the descriptors.

        Args:
            ranks: The global ranks on this host.
            rank: The global rank of this process.
            memory: The descriptor of the shared memory.
            wakers: An eventfd for each rank.
            processes: A pidfd for each rank.

        Raises:
            OSError: The memory cannot be mapped.
        """
        self.ranks = list(ranks)
        self.index = self.ranks.index(rank)
        self.dead: set[int] = set()
        self.shares_tensors = False
        # With a processor for each rank, to wait for a moment without sleeping is faster than to be woken.
        self.spin_seconds = _SPIN_SECONDS if len(self.ranks) <= len(os.sched_getaffinity(0)) else 0.0
        self._memory = PageMemory(memory, directory_bytes=DIRECTORY_BYTES, window_bytes=window_bytes(len(self.ranks)))
        self._wakers = wakers
        self._processes = dict(enumerate(processes))
        self._words = self._memory.directory.cast("Q")

    def register(self, loop: SharedEventLoop) -> None:
        """Handle the events of this rank's eventfd, and the ends of the others, in an event loop."""
        loop.register_wakeups(self._wakers[self.index])
        for index, process in self._processes.items():
            if index != self.index:
                loop.register(process, partial(self._mark_dead, loop, index, process))

    def wake(self, index: int) -> None:
        """Wake a rank up."""
        try:  # noqa: SIM105 - of every call, and suppress() takes longer
            os.eventfd_write(self._wakers[index], 1)
        except BlockingIOError:
            pass

    def reserve(self) -> None:
        """Prepare this process for the window of one group more, so that `attach` cannot fail for lack of memory.

        Raises:
            CollectiveError: The memory cannot be mapped, or too many groups are open.
        """
        try:
            with self._locked():
                self._memory.map_window(self._number_of(FREE))
        except OSError as error:
            raise _unmapped(error) from error

    def attach(self, group: int, num_members: int) -> Window:
        """Return the window of a group; each of its members attaches once, and detaches."""
        with self._locked():
            number = self._find(group)
        try:
            return Window(self._memory, number, num_members)
        except OSError as error:
            with self._locked():
                self._words[entry_word(number) + 1] += 1
            raise _unmapped(error) from error

    def detach(self, window: Window, num_members: int) -> None:
        """Release a window. The last member to detach frees its memory."""
        word = entry_word(window.number) + 1
        with self._locked():
            self._words[word] += 1
            is_last = self._words[word] == num_members
        if is_last:
            window.free()  # without the lock, which would be lost; no other group takes the entry before it is zero
            if self.shares_tensors:
                self._memory.free(staging_offset(window.number), MAX_STAGING_BYTES)
            with self._locked():
                self._words[word - 1] = self._words[word] = 0
        window.close()

    def map_staging(self, window: Window, nbytes: int, start: int = 0) -> SharedRange:
        """Map a part of the memory through which the tensors of a group pass, which is freed with its window.

        Raises:
            CollectiveError: There is no address space.
        """
        return SharedRange(self._memory.descriptor, staging_offset(window.number) + start, nbytes)

    @property
    def processes(self) -> dict[int, int]:
        """A pidfd for each other rank of this host."""
        return {self.ranks[index]: process for index, process in self._processes.items() if index != self.index}

    def is_dead(self, rank: int) -> bool:
        """Return whether a rank is one of this host, and has ended."""
        return rank in self.ranks and self.ranks.index(rank) in self.dead

    def close(self) -> None:
        """Close the descriptors of this process, which has detached from all windows."""
        descriptors = [*self._wakers, *self._processes.values()]
        self._wakers, self._processes = [], {}
        self._words.release()
        self._memory.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def _mark_dead(self, loop: SharedEventLoop, index: int, process: int) -> None:
        self.dead.add(index)
        loop.unregister(process)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the directory, against other threads and other ranks. It is released if the rank dies."""
        import fcntl  # noqa: PLC0415 - not on Windows, where no page is opened

        with self._memory.lock:
            fcntl.lockf(self._memory.descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._memory.descriptor, fcntl.LOCK_UN)

    def _find(self, group: int) -> int:
        """Return the number of a group's entry in the directory, which the first member that asks makes."""
        number = self._number_of(group + 1, FREE)
        self._words[COUNT_WORD] = max(self._words[COUNT_WORD], number + 1)
        self._words[entry_word(number)] = group + 1
        return number

    def _number_of(self, *ids: int) -> int:
        """Return the number of the entry that has the first of these words that there is, or of a new entry."""
        count = self._words[COUNT_WORD]
        start = GROUPS_OFFSET // 8
        entries = self._words[start : start + GROUP_WORDS * count : GROUP_WORDS].tolist()
        for wanted in ids:
            if wanted in entries:
                return entries.index(wanted)
        if count == MAX_GROUPS:
            raise CollectiveError(f"{MAX_GROUPS} groups are open; close those that are not used any more")
        return count


def _unmapped(error: OSError) -> CollectiveError:
    return CollectiveError(f"the memory of the group cannot be mapped: {error}")
