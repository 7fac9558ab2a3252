"""The places of everything in the memory that ranks share, compared with a recorded table: `tests/data/layout.txt`.

A rank that places something otherwise than the others reads what is not there, and no other test sees where. So the
table changes only together with a decision to change the layout: `python -m tests.comm.test_layout` records it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from rankwise._comm.control.page.host_page import HostPage
from rankwise._comm.control.page.layout import FILE_BYTES, PIPES_START, pipe_bytes, pipe_start, window_bytes
from rankwise._comm.control.page.meeting import PageMeeting
from rankwise._comm.control.page.pipes import PipeEnd
from rankwise._comm.control.page.window import Window
from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._comm.data.staging import Staging
from tests.recorded import assert_recorded, record

TABLE = "layout.txt"
SIZES = (2, 3, 126)


def call(sequence: int, body: bytes, kind: FrameKind = FrameKind.CALL) -> Frame:
    return Frame(kind, "barrier at train.py:1", b"a digest, 16 B..", body, group=6, sequence=sequence)


def written(descriptor: int) -> Iterator[str]:
    """Return all words of a file that are not zero, with their offsets; several equal ones in a row as one."""
    words: dict[int, bytes] = {}
    end = 0
    while True:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:  # there is no more data
            break
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        data = os.pread(descriptor, end - start, start)
        words |= {start + at: data[at : at + 8] for at in range(0, len(data), 8) if any(data[at : at + 8])}
    first = 0
    for offset, word in words.items():
        if words.get(offset - 8) != word:
            first = offset
        if words.get(offset + 8) != word:
            count = f" x {(offset - first) // 8 + 1}" if first != offset else ""
            yield f"  {first:#x} {word!r}{count}"


def page_of(size: int) -> tuple[HostPage, int]:
    """Return the page of a host with so many ranks, of which this process is the last one, and its file."""
    file = os.memfd_create("layout")
    os.truncate(file, FILE_BYTES)
    processes = [os.pidfd_open(os.getpid()) for _ in range(size)]
    wakers = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(size)]
    ranks = range(10, 10 + size)
    return HostPage(ranks=ranks, rank=ranks[-1], memory=os.dup(file), wakers=wakers, processes=processes), file


def write_all(page: HostPage, window: Window, size: int) -> None:
    """Write something to every place of a window."""
    last = size - 1
    window.write(last, call(1, b"in the slot"), has_room=True)
    window.write(last, call(2, b"L" * 8200), has_room=True)  # its body is longer than a slot
    window.write(last, call(3, b"in the ring"), has_room=False)
    window.write(0, call(2, b"a failure", FrameKind.FAILED), has_room=True)
    window.write(window.verdict_slot, call(1, b"the verdict"), has_room=True)
    window.arrivals[last][2] = 4711.5
    window.finished[last] = 2
    window.sleeping[0] = 1
    window.set_left(last, "it has left")
    window.set_ended(0, 4, "it has timed out")
    with pytest.raises(TimeoutError), mock.patch.object(PageMeeting, "missing", side_effect=TimeoutError):
        PageMeeting(window, last, 0.0).meet(lambda _: None)
    staging = page.map_staging(window, 1 << 16)
    staging.words(8, 1)[0] = 0x53
    pipes = page.map_staging(window, size**2 * pipe_bytes(size), PIPES_START)
    for sends, length in ((True, 8), (False, 5)):
        end = PipeEnd(pipes, pipe_start(size, last, 0), pipe_bytes(size), sends=sends, fence=window.fence)
        data = torch.arange(1, 1 + length, dtype=torch.uint8)
        end.begin(data)
        assert end.move() == length


def of_pages() -> Iterator[str]:
    for size in SIZES:
        yield f"a page of {size} ranks, whose last one writes in the second window:"
        page, file = page_of(size)
        first, window = page.attach(5, size), page.attach(6, size)
        write_all(page, window, size)
        page.detach(first, size)  # the others have not
        yield from written(file)
        window.close()
        page.close()
        os.close(file)


def of_windows() -> Iterator[str]:
    yield "lengths of windows:"
    sizes = (1, 2, 3, 8, 63, 64, 65, 126)
    yield from (f"  {size} members: {window_bytes(size):#x}, a pipe {pipe_bytes(size):#x}" for size in sizes)
    for size in SIZES:
        page, file = page_of(size)
        areas = [page._memory._area_of(number) for number in (0, 1, 5, 50, 500, 65_535)]
        offsets = [f"{page._memory.window_offset(number):#x}" for number in (0, 1, 65_535)]
        yield f"windows of {size} ranks: at {', '.join(offsets)}; area, its first window, their number: {areas}"
        page.close()
        os.close(file)


class RecordedRange:
    """Stands for the memory of a `Staging`, and notes the places that it asks for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def map(self, nbytes: int) -> RecordedRange:
        self.asked.append(f"{nbytes:#x} bytes")
        return self

    def allocate(self, start: int, nbytes: int) -> None:
        self.asked.append(f"own memory at {start:#x}, {nbytes:#x} bytes")

    def words(self, offset: int, count: int) -> memoryview:
        self.asked.append(f"{count} words at {offset:#x}")
        return memoryview(bytearray(8 * count)).cast("Q")

    def tensor(self, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        self.asked.append(f"{numel} of {dtype} at {offset:#x}")
        return torch.empty(0)


def of_staging() -> Iterator[str]:
    for size in (2, 3, 8, 64):
        memory = RecordedRange()
        staging = Staging(mock.Mock(map_staging=memory.map), group_rank=1, size=size)
        yield f"staging of {size} members, with steps of at most {staging.max_step_bytes:#x} bytes:"
        for nbytes in (100, staging.max_step_bytes // 2, staging.max_step_bytes, staging.max_step_bytes):
            staging.reserve(nbytes)
            place = staging.place(nbytes)
            for member in range(size):  # all have written
                staging._steps[(staging.step + 1) % 2][member] = staging.step + 1
            staging.begin(place, nbytes)
            yield f"  a step of {nbytes:#x} bytes is at {place:#x}"
        num_asked = len(memory.asked)
        staging.rows(torch.float16)
        rows = memory.asked[num_asked:]
        yield from (f"  {text}" for text in [*memory.asked[:num_asked], rows[0], rows[1], rows[-1]])


def layout() -> Iterator[str]:
    """Return the table."""
    yield from of_windows()
    yield from of_staging()
    yield from of_pages()


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="the table is that of pages of 4 KiB")
def test_everything_is_where_it_was() -> None:
    assert_recorded(TABLE, layout(), "tests.comm.test_layout")


if __name__ == "__main__":
    record(TABLE, layout())
