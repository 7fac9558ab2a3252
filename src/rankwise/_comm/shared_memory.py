"""Memory that the ranks of a host share: parts of the page that all of them write, and files that are written once.

By a file a rank gives data to the others. It is anonymous, so that nothing is left of it when the last process that has
it open or mapped has ended. Its seals forbid every change. A receiver maps it privately: it may write to its map, which
no other process sees, and which stays when the sender has gone. See docs/decisions/0037-values-in-shared-files.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from rankwise._memory import CHECKED_BYTES, require_available
from rankwise.errors import CollectiveError

_FAILED: Final = ctypes.c_void_p(-1).value

# An object with the buffer protocol, for which only later versions of Python have a name.
Buffer: TypeAlias = Any
# Linux alone has such files. They are the same on all ranks of a host, whose ranks then exchange data in another way.
_CREATE: Final = getattr(os, "memfd_create", None)
_LENGTH_SEALS: Final = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW")
# The most pieces and bytes of one call to write. If there are many bytes, it is checked before each call that there is
# memory for what is left, and for what other ranks of the host, at most seven, are writing after their own checks.
_MAX_PIECES: Final = 1024
_MAX_BYTES: Final = 1 << 24
_OTHERS_BYTES: Final = 7 * _MAX_BYTES


def map_memory(descriptor: int, offset: int, nbytes: int, *, flags: int) -> Any:  # noqa: ANN401 - a ctypes array
    """Map a part of a file, to read and write; it is unmapped when nothing refers to the returned array.

    Args:
        descriptor: The descriptor of the file.
        offset: The offset in the file, a multiple of the page size.
        nbytes: The length, one or more.
        flags: `mmap.MAP_SHARED` or `mmap.MAP_PRIVATE`.

    Raises:
        OSError: There is no address space.
    """
    libc = _libc()
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{nbytes} bytes of memory cannot be mapped: {os.strerror(number)}")
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False
    return memory


@cache
def _libc() -> Any:  # noqa: ANN401 - ctypes has no types
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class SharedRange:
    """Memory that all ranks of the host may map; it is unmapped when nothing refers to the range or its tensors.

    Attributes:
        address: The address in this process.
    """

    def __init__(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Map the range, without memory.

        Args:
            descriptor: The descriptor of the file.
            offset: The offset in the file, a multiple of the page size.
            nbytes: The length of the range.

        Raises:
            CollectiveError: There is no address space.
        """
        self._descriptor = descriptor
        self._offset = offset
        # What the tensors refer to: it may live longer than this object.
        with _no_memory_for(nbytes):
            self._memory = map_memory(descriptor, offset, nbytes, flags=mmap.MAP_SHARED)
        self.address = ctypes.addressof(self._memory)

    def allocate(self, start: int, nbytes: int) -> None:
        """Allocate the memory of a part: without that, writing to it would end the process where none is left.

        Raises:
            CollectiveError: There is no memory.
        """
        with _no_memory_for(nbytes):
            os.posix_fallocate(self._descriptor, self._offset + start, nbytes)

    def words(self, offset: int, count: int) -> memoryview:
        """Return words of 8 bytes at an offset in the range; keep the range while they are used."""
        return memoryview((ctypes.c_char * (8 * count)).from_address(self.address + offset)).cast("B").cast("Q")

    def tensor(self, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the flat tensor at an offset in the range; it has one element or more."""
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)


@contextlib.contextmanager
def _no_memory_for(nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CollectiveError(
            f"there is no memory for {nbytes:,} bytes that the ranks of this host share, through which tensors pass; "
            f"with RANKWISE_SHARED_MEMORY=0 they use connections: {error}"
        ) from error


class FileReference(NamedTuple):
    """What another process of the host needs to map the file.

    Attributes:
        process: The id of the process that has it open.
        descriptor: Its descriptor there.
        inode: The number of the file: process and descriptor may belong to another one when the owner has ended.
        nbytes: The length.
    """

    process: int
    descriptor: int
    inode: int
    nbytes: int


class SharedFile:
    """A file in memory with data for other ranks.

    Attributes:
        reference: What others need to map it, until it is closed.
    """

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        """Write the data: contiguous pieces, of one byte or more together.

        Raises:
            MemoryError: The host, or a control group of this process, has less memory.
            OSError: There is no memory, no descriptor, or no such files on this system.
        """
        self._descriptor = _create()
        with self._closed_on_error():
            _write(self._descriptor, pieces)
            _seal(self._descriptor, *_LENGTH_SEALS, "F_SEAL_WRITE")
            self.reference = _reference(self._descriptor)

    def close(self) -> None:
        """Close it. Those that have mapped it keep its memory."""
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


class ReceivedFile(SharedFile):
    """A file in memory for data that this rank receives from another host, for itself and the others of its host.

    Attributes:
        memory: Its contents, flat, to be written once.
    """

    def __init__(self, nbytes: int) -> None:  # makes a file, as the other class does
        """Allocate a file of one byte or more.

        Raises:
            OSError: There is no memory, no address space, no descriptor, or no such files on this system.
        """
        self._descriptor = _create()
        with self._closed_on_error():
            os.posix_fallocate(self._descriptor, 0, nbytes)
            _seal(self._descriptor, *_LENGTH_SEALS)
            memory = map_memory(self._descriptor, 0, nbytes, flags=mmap.MAP_SHARED)
            self.memory = torch.frombuffer(memory, dtype=torch.uint8)
            self.reference = _reference(self._descriptor)


def map_file(reference: FileReference) -> torch.Tensor:
    """Return the contents of the file of another process, or of this one, as a flat uint8 tensor of its own.

    The kernel opens it for processes of the same user alone.

    Raises:
        OSError: This process cannot open it, or has no address space for it.
    """
    process, descriptor, inode, nbytes = reference
    own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(own)
        # Without a seal its owner could shorten it, which would end this process when it reads the map.
        if (status.st_ino, status.st_size) != (inode, nbytes) or not _has_seals(own, *_LENGTH_SEALS):
            raise OSError(errno.ESTALE, "the descriptor belongs to another file")
        memory = map_memory(own, 0, nbytes, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(own)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _create() -> int:
    """Return the descriptor of a new file."""
    if _CREATE is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor: int = _CREATE("rankwise: a value", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return descriptor


def _reference(descriptor: int) -> FileReference:
    status = os.fstat(descriptor)
    return FileReference(os.getpid(), descriptor, status.st_ino, status.st_size)


def _seal(descriptor: int, *names: str) -> None:
    import fcntl  # noqa: PLC0415 - not on Windows, which has no such files

    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in names))


def _has_seals(descriptor: int, *names: str) -> bool:
    import fcntl  # noqa: PLC0415 - as above

    wanted: int = sum(getattr(fcntl, name) for name in names)
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted == wanted


def _write(descriptor: int, pieces: Sequence[Buffer]) -> None:
    views = [memoryview(piece) for piece in pieces]
    left = sum(view.nbytes for view in views)
    is_large = left > CHECKED_BYTES
    for rest in _steps(views):
        if is_large:
            require_available(left, reserve=_OTHERS_BYTES)
        left -= sum(view.nbytes for view in rest)
        while rest:
            written = os.writev(descriptor, rest)
            while rest and written >= rest[0].nbytes:
                written -= rest.pop(0).nbytes
            if written:
                rest[0] = rest[0].cast("B")[written:]


def _steps(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Return what is written at once: few pieces, with few bytes together."""
    step: list[memoryview] = []
    nbytes = 0
    for view in views:
        starts = range(0, view.nbytes, _MAX_BYTES)
        parts = [view] if len(starts) <= 1 else [view.cast("B")[start : start + _MAX_BYTES] for start in starts]
        for part in parts:
            if len(step) == _MAX_PIECES or nbytes + part.nbytes > _MAX_BYTES:
                yield step
                step, nbytes = [], 0
            step.append(part)
            nbytes += part.nbytes
    yield step
