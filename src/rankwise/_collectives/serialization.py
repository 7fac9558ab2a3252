"""Serialization of any value: a pickle, and the contents of its tensors and arrays beside the pickle.

A value is sent in two steps. Its header goes with the frame of the collective, and contains the whole value if that is
small. Otherwise it contains the sizes of the buffers, so that the receivers can allocate them before any data moves.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch

from rankwise._collectives.deferred import Deferred, not_unpickled
from rankwise._collectives.out_of_band import (
    Pickled,
    Piece,
    aligned,
    device_types,
    memory_of_piece,
    owned_memory,
    unpickle,
)
from rankwise._comm.buffers import as_bytes, contents, device_of_bytes, memory_of, to_tensor
from rankwise._comm.comm import INLINE_BYTES, Comm
from rankwise._comm.shared_memory import SharedFile
from rankwise._xla_use import DEVICE_TYPE, is_used

_T = TypeVar("_T")
# A piece of a buffer, with its offset there and its size in bytes.
Placed: TypeAlias = tuple[int, int, Piece]

# Short values of these types, such as the metrics of a step, are sent often. A pickle of them needs nothing beside it,
# and takes a fraction of the time of any other value.
_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_MOST_SCALARS: Final = 64

_ZEROS: Final = bytes(aligned(1))
# A file takes longer than the data planes below about this size, and a process may have 65,530 maps: a program that
# keeps the results of all its steps has no more of them than it has MiB.
_LEAST_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first message about a value, sent before any buffer.

    Attributes:
        sizes: The size in bytes of each buffer that follows, by type of device.
        table: What is needed to read the pickle; b"" if it is in the CPU buffer, or if nothing is needed.
        pickled: The pickle; b"" if it is in the CPU buffer.
        lengths: The lengths of table and pickle at the beginning of the CPU buffer; (0, 0) if they are not there.
        inline: If no buffer follows, the contents of tensors and arrays.
        free: If the CPU buffer is large, the bytes of memory that the sender's host has left; 0 if that is not known.
    """

    sizes: Mapping[str, int]
    table: bytes = b""
    pickled: bytes = b""
    lengths: tuple[int, int] = (0, 0)
    inline: bytes = b""
    free: int = 0

    def encode(self) -> bytes:
        return pickle.dumps((dict(self.sizes), self.table, self.pickled, self.lengths, self.inline, self.free))

    @property
    def file_bytes(self) -> int:
        """The length of the CPU buffer if it is large enough to go through a file, otherwise 0."""
        nbytes = self.sizes.get("cpu", 0)
        return nbytes if nbytes >= _LEAST_FILE_BYTES else 0

    def without_file(self) -> Header:
        """Return what remains when the contents of the file, if the value needs one, have arrived."""
        return replace(self, sizes=_without_host(self.sizes)) if self.file_bytes else self

    @classmethod
    def decode(cls, data: bytes) -> Header:
        sizes, table, pickled, lengths, inline, free = pickle.loads(data)
        return cls(sizes=sizes, table=table, pickled=pickled, lengths=lengths, inline=inline, free=free)


@dataclass(slots=True)
class Serialized:
    """A serialized value.

    Attributes:
        header: The first message.
        pieces: The pieces of each buffer, by type of device.
    """

    header: Header
    pieces: dict[str, list[Placed]] = field(default_factory=dict)
    _pickled: Pickled | None = None
    _buffers: dict[str, torch.Tensor] | None = None

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that follow the header, by type of device: flat uint8 tensors on that device."""
        if self._buffers is None:
            self._buffers = {device: _concatenated(pieces) for device, pieces in self.pieces.items() if pieces}
        return self._buffers

    def copy(self) -> dict[str, torch.Tensor]:
        """Return copies of the buffers, as if they had been received."""
        return {device: data.clone() for device, data in self.buffers.items()}

    def without_file(self) -> Serialized:
        """Return what remains when the contents of the file, if the value needs one, have arrived."""
        if not self.header.file_bytes:
            return self
        return Serialized(self.header.without_file(), _without_host(self.pieces))

    def with_short_header(self) -> Serialized:
        """Return the value with its pickle in the CPU buffer, if there are buffers and the pickle is in the header."""
        if self._pickled is None or not (self.header.sizes and self.header.pickled):
            return self
        return _in_buffers(self._pickled, has_pickle=False)

    def write_file(self) -> SharedFile:
        """Return a file with the contents of the CPU buffer.

        Raises:
            MemoryError: The host, or a control group of this process, has less memory.
            OSError: There is no memory, no descriptor, or no such files on this system.
        """
        memories: list[Any] = []
        end = 0
        for start, nbytes, piece in self.pieces["cpu"]:
            if start > end:
                memories.append(_ZEROS[: start - end])
            memories.append(memory_of_piece(piece))
            end = start + nbytes
        return SharedFile(memories)


def serialize(value: object, *, most_inline: int = INLINE_BYTES) -> Serialized:
    """Return a value in serialized form: in its header, if it has at most so many bytes and is not on an accelerator.

    Raises:
        PayloadTypeError: It cannot be pickled.
    """
    if _is_plain(value) and len(data := pickle.dumps(value, pickle.HIGHEST_PROTOCOL)) <= most_inline:
        return Serialized(Header(sizes={}, pickled=data))
    pickled = Pickled(value)
    num_described = pickled.nbytes + len(pickled.table)
    is_on_host = all(device == "cpu" for device, _, _ in pickled.contents)
    if is_on_host and num_described + sum(nbytes for _, _, nbytes in pickled.contents) <= most_inline:
        pieces = _pieces(pickled, has_pickle=True).get("cpu", [])
        inline = contents(_concatenated(pieces)) if pieces else b""
        return Serialized(Header(sizes={}, table=pickled.table, pickled=b"".join(pickled.chunks), inline=inline))
    # A header has to fit into a frame.
    return _in_buffers(pickled, has_pickle=bool(pickled.contents) and num_described <= INLINE_BYTES)


def deserialize(header: Header, buffers: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401 - any value of the user's
    """Return the value; where a rank has tensors on an XLA device, and another thread helps it, as a `Deferred`.

    It takes ownership of the buffers.

    Raises:
        PayloadTypeError: It cannot be unpickled here.
    """
    try:
        if not (header.sizes or header.table):
            return pickle.loads(header.pickled)
        table, stream = header.table, memoryview(header.pickled)
        if not header.sizes:
            buffers = {"cpu": to_tensor(header.inline)}
        elif header.lengths != (0, 0):
            num_table, num_pickled = header.lengths
            start = aligned(num_table)
            end = aligned(start + num_pickled)
            memory = owned_memory(buffers["cpu"])
            table, stream = bytes(memory[:num_table]), memory[start : start + num_pickled]
            buffers = {**buffers, "cpu": buffers["cpu"][end:]}
        load = partial(unpickle, stream, table, buffers)
        if is_used() and DEVICE_TYPE in device_types(table):
            from rankwise._torch_xla import is_helper_thread  # noqa: PLC0415 - not needed without such devices

            return Deferred(load) if is_helper_thread() else load()
        return load()
    except Exception as error:
        raise not_unpickled(error) from error


def empty_buffers(header: Header, comm: Comm) -> dict[str, torch.Tensor]:
    """Return uninitialized buffers to receive a value into.

    A buffer is on this rank's device if the sender's is on a device of the same type, otherwise on the CPU.
    """
    return {
        device: torch.empty(nbytes, dtype=torch.uint8, device=device_of_bytes(comm.device, device))
        for device, nbytes in header.sizes.items()
    }


def buffer_devices(headers: Sequence[Header]) -> list[str]:
    """Return the device types of all buffers, in the same order on all ranks."""
    return sorted({device for header in headers for device in header.sizes})


def _is_plain(value: Any) -> bool:  # noqa: ANN401 - any value of the user's
    """Return whether a value is one of Python's scalars, or a short dict, list or tuple of them."""
    kind = type(value)
    if kind is dict:
        return len(value) <= _MOST_SCALARS and _SCALARS.issuperset(map(type, (*value, *value.values())))
    if kind is list or kind is tuple:
        return len(value) <= _MOST_SCALARS and _SCALARS.issuperset(map(type, value))
    return kind in _SCALARS


def _in_buffers(pickled: Pickled, *, has_pickle: bool) -> Serialized:
    """Return a value in buffers; whether its header has the pickle, or the CPU buffer."""
    pieces = _pieces(pickled, has_pickle=has_pickle)
    sizes = {device: _end(parts) for device, parts in pieces.items()}
    if has_pickle:
        header = Header(sizes=sizes, table=pickled.table, pickled=b"".join(pickled.chunks))
    else:
        header = Header(sizes=sizes, lengths=(len(pickled.table), pickled.nbytes))
    return Serialized(header, pieces, pickled)


def _pieces(pickled: Pickled, *, has_pickle: bool) -> dict[str, list[Placed]]:
    """Return the pieces of one buffer for each type of device: each buffer is one transfer, whatever it contains."""
    pieces: dict[str, list[Placed]] = {}
    ends: dict[str, int] = {}
    if not has_pickle:
        pieces["cpu"] = [(0, len(pickled.table), pickled.table)]
        ends["cpu"] = aligned(len(pickled.table))
        for chunk in pickled.chunks:
            pieces["cpu"].append((ends["cpu"], len(chunk), chunk))
            ends["cpu"] += len(chunk)
    for device, piece, nbytes in pickled.contents:
        start = aligned(ends.get(device, 0))
        pieces.setdefault(device, []).append((start, nbytes, piece))
        ends[device] = start + nbytes
    return dict(sorted(pieces.items()))  # all ranks move the buffers in this order, as `buffer_devices` has it


def _without_host(of_devices: Mapping[str, _T]) -> dict[str, _T]:
    """Return what is not of the CPU, of a mapping by type of device."""
    return {device: one for device, one in of_devices.items() if device != "cpu"}


def _end(pieces: Sequence[Placed]) -> int:
    """Return the length of a buffer with these pieces."""
    start, nbytes, _ = pieces[-1]
    return start + nbytes


def _concatenated(pieces: Sequence[Placed]) -> torch.Tensor:
    """Return one flat uint8 tensor with the pieces of a buffer, zeros between them; a single one as it is."""
    first = pieces[0][2]
    device = first.device if isinstance(first, torch.Tensor) else torch.device("cpu")
    if len(pieces) == 1 and isinstance(first, torch.Tensor):
        return as_bytes(first)
    whole = torch.zeros(_end(pieces), dtype=torch.uint8, device=device)
    for start, nbytes, piece in pieces:
        if isinstance(piece, torch.Tensor):
            whole[start : start + nbytes] = as_bytes(piece)
        elif nbytes:
            memory_of(whole)[start : start + nbytes] = memoryview(piece).cast("B")
    return whole
