"""Pickles beside which the contents of tensors and arrays are kept, so that they are copied once, or not at all.

Tensors, wherever they are in the value, come back as from `torch.load` after `torch.save`: leaves, which require
gradients if they did, with their strides and attributes; parameters and subclasses too. But a view does not bring the
rest of its storage along: it has the strides of its `clone()`.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from rankwise._comm.buffers import as_bytes, memory_of, require_memory
from rankwise._pickling import Definitions, Pickler, Unpickler, explained
from rankwise._torch import REBUILD_ON_DEVICE, waited
from rankwise._xla_use import DEVICE_TYPE, is_used
from rankwise.errors import PayloadTypeError

# A piece of a value: bytes, or a contiguous tensor or array with its contents.
Piece: TypeAlias = Any

# Each piece begins at a multiple of this, so that elements of any dtype can be read there.
_ALIGNMENT: Final = 16
# Tensors and arrays below this size are copied out of the memory of the whole value, which would live as long as they:
# a program may keep the losses of all its steps, and not what else was gathered with them.
_COPIED_BYTES: Final = 1024
# Buffers of other objects below this size stay in the pickle.
_SMALL_BUFFER_BYTES: Final = 8192
# The kinds of numpy's dtypes for which an array is its memory: bools, integers, floats, complex numbers.
_NUMERIC_KINDS: Final = frozenset("biufc")


class Pickled:
    """A pickle of a value, in chunks, and the contents of its tensors and arrays.

    Attributes:
        chunks: The pickle.
        table: What is needed to read it: the sizes of the contents, their devices, and definitions of `__main__`.
        contents: The contents, each with the type of its device and its size in bytes.
    """

    def __init__(self, value: object) -> None:
        """Pickle a value.

        Raises:
            PayloadTypeError: It cannot be pickled.
        """
        self.chunks: list[bytes | memoryview] = []
        pickler = _Pickler(self)
        try:
            pickler.dump(value)
        except MemoryError:  # which is not about the value's type
            raise
        except Exception as error:  # noqa: BLE001 - any error of an object
            text, cause = explained(error, "leave that part out")
            raise PayloadTypeError(
                f"a {type(value).__qualname__} cannot be sent to other ranks, since it cannot be pickled: {text}"
            ) from cause
        self.contents = pickler.contents
        definitions = Definitions.of(pickler.referenced) if pickler.referenced else ()
        devices = [device for device, _, _ in self.contents]
        lengths = array("q", [nbytes for _, _, nbytes in self.contents]).tobytes()
        self.table = pickle.dumps((lengths, devices if set(devices) - {"cpu"} else None, *definitions))

    def write(self, chunk: bytes) -> None:
        """Take a chunk of the pickle: this object is the pickler's file. Large bytes come as they are in the value."""
        self.chunks.append(chunk if isinstance(chunk, bytes) else memoryview(chunk))

    @property
    def nbytes(self) -> int:
        """The length of the pickle."""
        return sum(map(len, self.chunks))


def unpickle(stream: memoryview | bytes, table: bytes, buffers: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401 - any value
    """Return the value of a pickle, with contents that are in buffers, by type of device. It takes over the buffers."""
    sizes, devices, *definitions = pickle.loads(table)
    lengths = array("q", sizes)
    return _Unpickler(stream, Definitions(*definitions), lengths, devices or ["cpu"] * len(lengths), buffers).load()


def device_types(table: bytes) -> set[str]:
    """Return the types of the devices that contents are from."""
    return {*(pickle.loads(table)[1] or ["cpu"])}


def aligned(nbytes: int) -> int:
    """Return the offset at which a piece may begin behind so many bytes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def memory_of_piece(piece: Piece) -> Any:  # noqa: ANN401 - a contiguous buffer
    """Return the memory of a piece on the CPU; keep the piece while it is used."""
    if not isinstance(piece, torch.Tensor):
        return piece
    nbytes = piece.nbytes
    return (ctypes.c_char * nbytes).from_address(piece.data_ptr()) if nbytes else b""


class _Pickler(Pickler):
    """A pickler that keeps the contents of tensors and arrays apart; functions and classes may be from anywhere.

    Attributes:
        contents: As those of `Pickled`.
    """

    def __init__(self, file: Pickled) -> None:
        self.contents: list[tuple[str, Piece, int]] = []
        numpy = sys.modules.get("numpy")
        self._array_type = None if numpy is None else numpy.ndarray
        super().__init__(file, buffer_callback=_kept_apart(self.contents))  # type: ignore[arg-type]  # write() is all it needs

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any value of the user's
        kind = type(value)
        if kind is self._array_type:
            return self._reduced_array(value)
        if isinstance(value, torch.Tensor) and kind is not torch.Tensor:
            _refuse_shard(value)
            if (plain := waited(value)) is not value:
                value, kind = plain, torch.Tensor
        if kind is not torch.Tensor or value.layout is not torch.strided:
            return super().reducer_override(value)
        if value.is_quantized or value.is_meta or value.is_nested:  # a nested tensor keeps its contents in another one
            return super().reducer_override(value)
        require_memory(value)
        # Contents are sent in the order of memory, not of the dimensions: no copy of a transposed tensor is needed.
        strides = () if value.is_contiguous() else torch.empty_like(value, device="meta").stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        is_memory = value.is_cpu and not (strides or value.is_conj() or value.is_neg())
        index = len(self.contents)
        contents = value if is_memory else as_bytes(value.permute(order) if strides else value)
        self.contents.append((value.device.type, contents, contents.nbytes))
        reduced = _out_of_band_tensor, (index, value.dtype, tuple(value.shape), strides, value.requires_grad)
        attributes = value.__dict__
        return (*reduced, attributes, None, None, _set_attributes) if attributes else reduced

    def _reduced_array(self, value: Any) -> Any:  # noqa: ANN401 - an array
        dtype, flags = value.dtype, value.flags
        if not (dtype.isbuiltin == 1 and dtype.kind in _NUMERIC_KINDS and flags.c_contiguous and flags.writeable):
            return NotImplemented  # which pickle knows; large ones come to the callback
        self.contents.append(("cpu", value, value.nbytes))
        return _out_of_band_array, (len(self.contents) - 1, dtype, value.shape)


class _Unpickler(Unpickler):
    """An unpickler that takes the contents of tensors and arrays from buffers."""

    def __init__(
        self,
        stream: memoryview | bytes,
        definitions: Definitions,
        lengths: Sequence[int],
        devices: Sequence[str],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        self._buffers = buffers
        self._devices = devices
        self._lengths = lengths
        self._memory = owned_memory(buffers["cpu"]) if "cpu" in buffers else memoryview(b"")
        self._starts: list[int] = []
        ends = dict.fromkeys(buffers, 0)
        for device, nbytes in zip(devices, lengths, strict=True):
            self._starts.append(ends[device])
            ends[device] += aligned(nbytes)
        # Buffers of other objects are the contents that no tensor or array asks for, in their order.
        self._next = 0
        self._others = _OtherBuffers(self)
        super().__init__(_Stream(stream), definitions, buffers=self._others)  # type: ignore[arg-type]

    def load(self) -> Any:  # noqa: ANN401 - any value
        try:
            return super().load()
        finally:
            self._others.close()

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - any definition
        if module == __name__ and name == _out_of_band_tensor.__name__:
            return self._tensor
        if module == __name__ and name == _out_of_band_array.__name__:
            return self._array
        found = super().find_class(module, name)
        if module == REBUILD_ON_DEVICE[0] and name.startswith(REBUILD_ON_DEVICE[1]):
            from rankwise._torch_xla import on_own_device  # noqa: PLC0415 - not needed without such devices

            # Of a tensor of a subclass, torch pickles the device too: that of the thread of another rank.
            return on_own_device(found)
        return found

    def next_contents(self) -> memoryview:
        """Return the contents that no tensor or array asks for."""
        return self._memory[self._place(self._next)]

    def _place(self, index: int) -> slice:
        """Return where contents are; the pickle refers to all of them, in their order."""
        if index != self._next:
            raise PayloadTypeError("the contents of the value are in the wrong order")
        self._next += 1
        return slice(self._starts[index], self._starts[index] + self._lengths[index])

    def _tensor(
        self, index: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], requires_grad: bool
    ) -> torch.Tensor:
        place, device = self._place(index), self._devices[index]
        flat = self._contents(place, device, dtype)
        tensor = flat.as_strided(shape, strides) if strides else flat.reshape(shape)
        if device == DEVICE_TYPE and is_used():
            from rankwise import _torch_xla  # noqa: PLC0415 - not needed without such devices

            if not _torch_xla.is_helper_thread():
                tensor = tensor.to(_torch_xla.device())
        return tensor.requires_grad_(requires_grad)

    def _array(self, index: int, dtype: Any, shape: Sequence[int]) -> Any:  # noqa: ANN401 - numpy's
        import numpy as np  # noqa: PLC0415 - the array's dtype has imported it

        place = self._place(index)
        array = np.ndarray(shape, dtype, self._memory, place.start)
        return array.copy() if place.stop - place.start < _COPIED_BYTES else array

    def _contents(self, place: slice, device: str, dtype: torch.dtype) -> torch.Tensor:
        """Return contents as a flat tensor whose storage has nothing else."""
        buffer, nbytes = self._buffers[device], place.stop - place.start
        if len(self._lengths) == 1 and nbytes == buffer.numel():
            return buffer.view(dtype)
        if device != "cpu" or buffer.device.type != "cpu" or nbytes < _COPIED_BYTES:
            return buffer[place].clone().view(dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=place.start)


class _OtherBuffers:
    """The buffers of an unpickler, which refers to this object, as this one does to it until it is closed.

    Not a generator: closing one that was never started does not free what it refers to, from Python 3.12 on.
    """

    def __init__(self, unpickler: _Unpickler) -> None:
        self._unpickler: _Unpickler | None = unpickler

    def __iter__(self) -> _OtherBuffers:
        return self

    def __next__(self) -> memoryview:
        if self._unpickler is None:
            raise StopIteration
        return self._unpickler.next_contents()

    def close(self) -> None:
        """Forget the unpickler."""
        self._unpickler = None


class _Stream:
    """A pickle as the unpickler's file, from which nothing is copied."""

    def __init__(self, pickled: memoryview | bytes) -> None:
        self._rest = memoryview(pickled)

    def read(self, nbytes: int) -> memoryview:
        data, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return data

    def readinto(self, target: memoryview) -> int:
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def readline(self) -> bytes:
        line, end, _ = bytes(self._rest).partition(b"\n")  # only old protocols have lines
        return bytes(self.read(len(line) + len(end)))


def owned_memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous uint8 tensor on the CPU, which keeps the tensor."""
    memory = memory_of(tensor)
    if tensor.numel():
        array: Any = memory.obj  # all views of the memory refer to it
        array.tensor = tensor
    return memory


def _refuse_shard(tensor: torch.Tensor) -> None:
    """Check that a tensor means the same on other ranks.

    Raises:
        PayloadTypeError: It is a DTensor: another rank would take the shard of this one for its own.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise PayloadTypeError(
            "a DTensor has the shard of its rank: pass tensor.full_tensor(), which is collective, or tensor.to_local()"
        )


def _kept_apart(contents: list[tuple[str, Piece, int]]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return the callback that takes large buffers of objects; it does not refer to its pickler, which refers to it."""

    def callback(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if len(memory) < _SMALL_BUFFER_BYTES:
            return True  # keeps it in the pickle
        contents.append(("cpu", memory, memory.nbytes))
        return False

    return callback


def _out_of_band_tensor(index: int, *_: object) -> torch.Tensor:
    """Placeholder in a pickle for a tensor whose contents are apart; `_Unpickler.find_class` replaces it."""
    raise PayloadTypeError(f"the contents of tensor {index} are not in this pickle")


def _out_of_band_array(index: int, *_: object) -> None:
    """Placeholder in a pickle for an array whose contents are apart; `_Unpickler.find_class` replaces it."""
    raise PayloadTypeError(f"the contents of array {index} are not in this pickle")


def _set_attributes(tensor: torch.Tensor, attributes: Mapping[str, object]) -> None:
    tensor.__dict__.update(attributes)
