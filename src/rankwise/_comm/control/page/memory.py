"""The memory of a page in this process: an anonymous file with holes, which is mapped in a few areas.

It begins with the directory; the windows of the groups follow, each of the same length. An area has many windows, and
is mapped while one of them is open: each map keeps a descriptor, and address space may be limited.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import Final

# The least length of the windows that are mapped with the directory; each area after that has twice as many.
_FIRST_AREA_BYTES: Final = 1 << 24
# The length of the parts in which memory is freed.
_FREED_BYTES: Final = 1 << 30


class PageMemory:
    """The memory, by offset in the file.

    Attributes:
        descriptor: The descriptor of the file.
        lock: Held while memory is unmapped: that closes a descriptor of the file, and with any of them the process
            loses its lock on the directory.
        directory: The view of the directory.
    """

    def __init__(self, descriptor: int, *, directory_bytes: int, window_bytes: int) -> None:
        """Map the directory and the first windows.

        Raises:
            OSError: They cannot be mapped.
        """
        self.descriptor = descriptor
        self.lock = threading.Lock()
        self._directory_bytes = directory_bytes
        self._window_bytes = window_bytes
        self._num_first = max(1, _FIRST_AREA_BYTES // window_bytes)
        # The areas, and how many of their windows are open; the first one has the directory too, and stays.
        self._areas = {0: mmap.mmap(descriptor, directory_bytes + self._num_first * window_bytes)}
        self._num_open = {0: 1}
        self.directory = memoryview(self._areas[0])[:directory_bytes]

    def open_window(self, number: int) -> memoryview:
        """Return the view of a window, which is closed by `close_window`.

        Raises:
            OSError: It cannot be mapped.
        """
        area, first, _ = self._area_of(number)
        with self.lock:
            self.map_window(number)
            self._num_open[area] += 1
            start = (number - first) * self._window_bytes + (0 if area else self._directory_bytes)
            return memoryview(self._areas[area])[start : start + self._window_bytes]

    def map_window(self, number: int) -> None:
        """Map the area of a window, so that opening the window cannot fail; the caller holds the lock.

        Raises:
            OSError: It cannot be mapped.
        """
        area, first, count = self._area_of(number)
        if area not in self._areas:
            length = count * self._window_bytes
            self._areas[area] = mmap.mmap(self.descriptor, length, offset=self.window_offset(first))
            self._num_open[area] = 0

    def close_window(self, number: int) -> None:
        """Unmap the area of a window if no other one of it is open; the views of the window are released."""
        area, _, _ = self._area_of(number)
        with self.lock:
            self._num_open[area] -= 1
            if not self._num_open[area]:
                self._areas.pop(area).close()

    def window_offset(self, number: int) -> int:
        """Return the offset of a window."""
        return self._directory_bytes + number * self._window_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the file."""
        pieces = []
        while length:
            piece = os.pread(self.descriptor, length, offset)
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return b"".join(pieces)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes to the file."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.pwrite(self.descriptor, rest, offset + len(data) - len(rest)) :]

    def free(self, offset: int, length: int) -> None:
        """Free memory, which is zero again; `offset` is a multiple of the page size."""
        for start in range(offset, offset + length, _FREED_BYTES):
            with (
                self.lock,
                mmap.mmap(self.descriptor, min(_FREED_BYTES, offset + length - start), offset=start) as area,
            ):
                area.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Unmap everything, and close the descriptor."""
        self.directory.release()
        for area in self._areas.values():
            with contextlib.suppress(BufferError):  # in a forked child, whose parent has windows open
                area.close()
        os.close(self.descriptor)

    def _area_of(self, number: int) -> tuple[int, int, int]:
        """Return the area of a window, and the first window of it and their number."""
        area = (number // self._num_first + 1).bit_length() - 1
        return area, self._num_first * ((1 << area) - 1), self._num_first << area
