"""Serialization of any value: a pickle, and the contents of its tensors and arrays as buffers beside the pickle.

Tensors, wherever they are in the value, come back as from `torch.load` after `torch.save`: leaves, which require
gradients if they did, with their strides and attributes; parameters and subclasses too. But a view does not bring the
rest of its storage along: it has the strides of its `clone()`.

A value is sent in two steps. Its header goes with the frame of the collective, and contains the whole value if that is
small. Otherwise it contains the sizes of the buffers, so that the receivers can allocate them before any data moves.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rankwise._collectives.deferred import Deferred, not_unpickled
from rankwise._comm.buffers import as_bytes, contents, device_of_bytes, from_bytes, memory_of, require_memory, to_tensor
from rankwise._comm.comm import INLINE_BYTES, Comm
from rankwise._pickling import Definitions, Pickler, Unpickler
from rankwise._torch_xla import DEVICE_TYPE, is_helper_thread, is_used, on_own_device
from rankwise._torch_xla import device as own_device
from rankwise.errors import PayloadTypeError

# The functions of torch that rebuild a pickled tensor on a device without memory of its own, as XLA's.
_REBUILD_ON_DEVICE: Final = "_rebuild_device_tensor_from_"
# Each piece of a buffer begins at a multiple of this, so that elements of any dtype can be read there.
_ALIGNMENT: Final = 16
# Arrays below this size stay in the pickle.
_SMALL_ARRAY_BYTES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutOfBand:
    """Description of a tensor or array whose contents are not in the pickle, but in a buffer.

    Attributes:
        nbytes: The size of the contents.
        device: The type of the tensor's device; the received tensor is on a device of that type if there is one.
        dtype, shape: The tensor's. `dtype` is None for the memory of an array.
        strides: The tensor's strides, or () if it is contiguous.
        requires_grad: Whether the tensor requires gradients.
    """

    nbytes: int
    device: str = "cpu"
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first message about a value, sent before any buffer.

    Attributes:
        sizes: The size in bytes of each buffer that follows, by type of device.
        inline: If no buffer follows, the whole value; otherwise the pickle, or b"" if it is too large for a header.
        pickle_bytes: The size of the pickle at the beginning of the CPU buffer; 0 if the pickle is inline.
    """

    sizes: Mapping[str, int]
    inline: bytes = b""
    pickle_bytes: int = 0

    def encode(self) -> bytes:
        return pickle.dumps((dict(self.sizes), self.inline, self.pickle_bytes))

    @classmethod
    def decode(cls, data: bytes) -> Header:
        sizes, inline, pickle_bytes = pickle.loads(data)
        return cls(sizes=sizes, inline=inline, pickle_bytes=pickle_bytes)


@dataclass(slots=True)
class Serialized:
    """A serialized value.

    Attributes:
        header: The first message.
        buffers: The buffers that follow, by type of device: flat uint8 tensors on that device.
    """

    header: Header
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def copy(self) -> dict[str, torch.Tensor]:
        """Return copies of the buffers, as if they had been received."""
        return {device: data.clone() for device, data in self.buffers.items()}

    def with_short_header(self) -> Serialized:
        """Return the value with its pickle in the CPU buffer, if there are buffers and the pickle is in the header."""
        if not (self.header.sizes and self.header.inline):
            return self
        host = [to_tensor(self.header.inline)] + [data for device, data in self.buffers.items() if device == "cpu"]
        buffers = {**self.buffers, "cpu": _concatenated(host)}
        return Serialized.of(buffers, pickle_bytes=len(self.header.inline))

    @classmethod
    def of(cls, buffers: dict[str, torch.Tensor], *, inline: bytes = b"", pickle_bytes: int = 0) -> Serialized:
        """Return a value whose contents are in buffers."""
        sizes = {device: data.numel() for device, data in buffers.items()}
        return cls(Header(sizes=sizes, inline=inline, pickle_bytes=pickle_bytes), buffers)


def serialize(value: object, *, most_inline: int = INLINE_BYTES) -> Serialized:
    """Return a value in serialized form: in its header, if it has at most so many bytes and is not on an accelerator.

    Raises:
        PayloadTypeError: It cannot be pickled.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except MemoryError:  # which is not about the value's type
        raise
    except Exception as error:
        raise PayloadTypeError(
            f"a {type(value).__qualname__} cannot be sent to other ranks, since it cannot be pickled: {error}"
        ) from error
    definitions = Definitions.of(pickler.referenced) if pickler.referenced else ()
    # The pickle of the value refers to its tensors by index; this one has their descriptions, needed to read it.
    envelope = pickle.dumps((pickler.parts, stream.getvalue(), *definitions))
    host = [data for part, data in zip(pickler.parts, pickler.contents, strict=True) if part.device == "cpu"]
    is_small = len(envelope) + sum(data.numel() for data in host) <= most_inline
    if is_small and len(host) == len(pickler.contents):
        return Serialized(Header(sizes={}, inline=pickle.dumps((envelope, contents(_concatenated(host))))))

    # A header has to fit into a frame: a larger pickle, or one without contents, becomes the first piece of the CPU
    # buffer.
    pickle_bytes = 0
    if len(envelope) > INLINE_BYTES or not pickler.contents:
        host.insert(0, to_tensor(envelope))
        pickle_bytes, envelope = len(envelope), b""
    # One buffer for each type of device, whatever the number of tensors: each buffer is one transfer.
    buffers = {"cpu": _concatenated(host)} if host else {}
    for device in dict.fromkeys(part.device for part in pickler.parts if part.device != "cpu"):
        buffers[device] = _concatenated(
            [data for part, data in zip(pickler.parts, pickler.contents, strict=True) if part.device == device]
        )
    return Serialized.of(buffers, inline=envelope, pickle_bytes=pickle_bytes)


def deserialize(header: Header, buffers: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401 - any value of the user's
    """Return the value; where a rank has tensors on an XLA device, and another thread helps it, as a `Deferred`.

    It takes ownership of the buffers.

    Raises:
        PayloadTypeError: It cannot be unpickled here.
    """
    if header.sizes:
        host = buffers.get("cpu", to_tensor(b""))
        envelope = header.inline or contents(host[: header.pickle_bytes])
        buffers = {**buffers, "cpu": host[_aligned_size(header.pickle_bytes) :]}
    else:
        envelope, data = pickle.loads(header.inline)
        buffers = {"cpu": to_tensor(data)}
    try:
        parts, stream, *definitions = pickle.loads(envelope)
        load = _Unpickler(stream, Definitions(*definitions), parts, buffers).load
        return Deferred(load) if is_helper_thread() and any(part.device == DEVICE_TYPE for part in parts) else load()
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


class _Pickler(Pickler):
    """A pickler that puts the contents of tensors and arrays into buffers; functions and classes may be from anywhere.

    Attributes:
        parts: The tensors and arrays whose contents are not in the pickle.
        contents: Their contents: flat uint8 tensors on their devices.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self.parts: list[_OutOfBand] = []
        self.contents: list[torch.Tensor] = []
        super().__init__(file, buffer_callback=self._buffer_callback)

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any value of the user's
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return super().reducer_override(value)
        if value.is_quantized or value.is_meta or value.is_nested:  # a nested tensor keeps its contents in another one
            return super().reducer_override(value)
        require_memory(value)
        # Contents are sent in the order of memory, not of the dimensions: no copy of a transposed tensor is needed.
        strides = () if value.is_contiguous() else torch.empty_like(value, device="meta").stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        data = as_bytes(value.permute(order) if strides else value)
        part = _OutOfBand(
            nbytes=data.numel(),
            device=value.device.type,
            dtype=value.dtype,
            shape=tuple(value.shape),
            strides=strides,
            requires_grad=value.requires_grad,
        )
        reduced = _out_of_band_tensor, (self._add_buffer(part, data),)
        attributes = value.__dict__
        return (*reduced, attributes, None, None, _set_attributes) if attributes else reduced

    def _add_buffer(self, part: _OutOfBand, data: torch.Tensor) -> int:
        self.parts.append(part)
        self.contents.append(data)
        return len(self.parts) - 1

    def _buffer_callback(self, buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if len(memory) < _SMALL_ARRAY_BYTES:
            return True  # keeps the array in the pickle
        data = to_tensor(memory) if memory.readonly else torch.frombuffer(memory, dtype=torch.uint8)
        self._add_buffer(_OutOfBand(nbytes=len(memory)), data)
        return False


class _Unpickler(Unpickler):
    """An unpickler that takes the contents of tensors and arrays from buffers."""

    def __init__(
        self, stream: bytes, definitions: Definitions, parts: Sequence[_OutOfBand], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        starts = dict.fromkeys(buffers, 0)
        self._is_single = len(parts) == 1
        self._parts: list[tuple[_OutOfBand, torch.Tensor]] = []
        for part in parts:
            start = starts[part.device]
            self._parts.append((part, buffers[part.device][start : start + part.nbytes]))
            starts[part.device] = start + _aligned_size(part.nbytes)
        arrays = [_array_memory(data) for part, data in self._parts if part.dtype is None]
        super().__init__(io.BytesIO(stream), definitions, buffers=arrays)

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - any definition
        if (module, name) == (__name__, _out_of_band_tensor.__name__):
            return self._tensor
        found = super().find_class(module, name)
        # Of a tensor of a subclass, torch pickles the device too: that of the thread of another rank.
        return on_own_device(found) if module == "torch._utils" and name.startswith(_REBUILD_ON_DEVICE) else found

    def _tensor(self, index: int) -> torch.Tensor:
        part, data = self._parts[index]
        if part.dtype is None:
            raise PayloadTypeError("the buffers of the value are in the wrong order")
        # A view would keep the whole buffer alive, and torch.save would write all of it.
        owned = data if self._is_single else data.clone()
        if part.strides:
            tensor = owned.view(part.dtype).as_strided(part.shape, part.strides)
        else:
            tensor = from_bytes(owned, part.dtype, part.shape)
        if part.device == DEVICE_TYPE and is_used() and not is_helper_thread():
            tensor = tensor.to(own_device())
        return tensor.requires_grad_(part.requires_grad)


def _out_of_band_tensor(index: int) -> torch.Tensor:
    """Placeholder in a pickle for a tensor whose contents are in a buffer; `_Unpickler.find_class` replaces it."""
    raise PayloadTypeError(f"the contents of tensor {index} are not in this pickle")


def _set_attributes(tensor: torch.Tensor, attributes: Mapping[str, object]) -> None:
    tensor.__dict__.update(attributes)


def _array_memory(data: torch.Tensor) -> Any:  # noqa: ANN401 - a writable buffer
    return memoryview(bytearray(memory_of(data)))


def _aligned_size(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT


def _concatenated(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one flat uint8 tensor with the contents of several, each aligned for any dtype; a single one as it is."""
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:
        return to_tensor(b"")
    whole = torch.zeros(
        sum(_aligned_size(piece.numel()) for piece in pieces), dtype=torch.uint8, device=pieces[0].device
    )
    start = 0
    for piece in pieces:
        whole[start : start + piece.numel()] = piece
        start += _aligned_size(piece.numel())
    return whole
