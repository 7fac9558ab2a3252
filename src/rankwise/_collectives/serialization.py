"""How any value travels: a pickle, and beside it the contents of the tensors and arrays in it, as they are.

Tensors are what `torch.load` returns after `torch.save`, wherever in the value they are: leaves, which require
gradients if they did, with their strides and attributes, parameters and subclasses too. But what is a part of a larger
tensor does not bring that along: it has the strides of its `clone()`.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rankwise._comm.buffers import as_bytes, contents, from_bytes, memory_of, require_memory, to_tensor
from rankwise._comm.group import INLINE_BYTES, Comm
from rankwise._pickling import Definitions, Pickler, Unpickler
from rankwise.errors import PayloadTypeError

# Where pieces of a buffer begin, so that any type can be read there.
_ALIGNMENT: Final = 16
# Arrays below this size stay in the pickle.
_SMALL_ARRAY_BYTES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor or array that is not in the pickle.

    Attributes:
        nbytes: Its size.
        device: The type of the device it was on, and is to be on again.
        dtype, shape: The tensor's; no type for an array's memory.
        strides: Those of its elements, if they are not in order.
        requires_grad: Gradients are to be computed for it.
    """

    nbytes: int
    device: str = "cpu"
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a rank says of its value before the bulk moves.

    Attributes:
        sizes: The bytes of bulk that follow, by type of device.
        small: The whole value, if nothing follows; else the pickle, unless that is bulk too.
        pickled: The bytes at the beginning of the bulk that are the pickle.
    """

    sizes: Mapping[str, int]
    small: bytes = b""
    pickled: int = 0

    def encode(self) -> bytes:
        return pickle.dumps((dict(self.sizes), self.small, self.pickled))

    @classmethod
    def decode(cls, data: bytes) -> Header:
        sizes, small, pickled = pickle.loads(data)
        return cls(sizes=sizes, small=small, pickled=pickled)


@dataclass(slots=True)
class Serialized:
    """A value ready to travel.

    Attributes:
        letter: What is said of it first.
        bulk: What follows, by type of device: flat uint8 tensors there.
    """

    letter: Header
    bulk: dict[str, torch.Tensor] = field(default_factory=dict)

    def copy(self) -> dict[str, torch.Tensor]:
        """Return the bulk as if it had been received: new."""
        return {device: data.clone() for device, data in self.bulk.items()}


def pack(value: object) -> Serialized:
    """Make a value ready to travel.

    Raises:
        PayloadTypeError: It cannot be pickled.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except Exception as error:
        raise PayloadTypeError(
            f"a {type(value).__qualname__} cannot travel between ranks, for it cannot be pickled: {error}"
        ) from error
    definitions = Definitions.of(pickler.referenced) if pickler.referenced else ()
    head = pickle.dumps((pickler.parts, stream.getvalue(), *definitions))
    host = [data for part, data in zip(pickler.parts, pickler.contents, strict=True) if part.device == "cpu"]
    small = len(head) + sum(data.numel() for data in host) <= INLINE_BYTES
    if small and len(host) == len(pickler.contents):
        return Serialized(Header(sizes={}, small=pickle.dumps((head, contents(_joined(host))))))

    pickled = 0
    if len(head) > INLINE_BYTES:
        host.insert(0, to_tensor(head))
        pickled, head = len(head), b""
    bulk = {"cpu": _joined(host)} if host else {}
    for device in dict.fromkeys(part.device for part in pickler.parts if part.device != "cpu"):
        bulk[device] = _joined(
            [data for part, data in zip(pickler.parts, pickler.contents, strict=True) if part.device == device]
        )
    sizes = {device: data.numel() for device, data in bulk.items()}
    return Serialized(Header(sizes=sizes, small=head, pickled=pickled), bulk)


def unpack(letter: Header, bulk: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401 - any value of the user's
    """Return the value. It owns the bulk.

    Raises:
        PayloadTypeError: It cannot be unpickled here.
    """
    if letter.sizes:
        host = bulk.get("cpu", to_tensor(b""))
        head = letter.small or contents(host[: letter.pickled])
        bulk = {**bulk, "cpu": host[_aligned(letter.pickled) :]}
    else:
        head, data = pickle.loads(letter.small)
        bulk = {"cpu": to_tensor(data)}
    try:
        parts, stream, *definitions = pickle.loads(head)
        return _Unpickler(stream, Definitions(*definitions), parts, bulk).load()
    except Exception as error:
        raise PayloadTypeError(f"what another rank sent cannot be unpickled here: {error}") from error


def room_for(letter: Header, comm: Comm) -> dict[str, torch.Tensor]:
    """Return empty bulk for a value from another rank: on this rank's device if the value is on the like of it."""
    return {
        device: torch.empty(
            nbytes, dtype=torch.uint8, device=comm.device if device == comm.device.type else torch.device("cpu")
        )
        for device, nbytes in letter.sizes.items()
    }


def bulk_devices(letters: Sequence[Header]) -> list[str]:
    """Return the types of device that bulk is on, in the same order on all ranks."""
    return sorted({device for letter in letters for device in letter.sizes})


class _Pickler(Pickler):
    """Leaves the contents of tensors and arrays out of the pickle, and takes functions and classes of any origin.

    Attributes:
        parts: What was left out.
        contents: Their contents, flat uint8 tensors where the tensors are.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self.parts: list[_Part] = []
        self.contents: list[torch.Tensor] = []
        super().__init__(file, buffer_callback=self._leave_out_array)

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any value of the user's
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return super().reducer_override(value)
        if value.is_quantized or value.is_meta or value.is_nested:  # a nested one has its contents in another tensor
            return super().reducer_override(value)
        require_memory(value)
        strides = () if value.is_contiguous() else torch.empty_like(value, device="meta").stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        data = as_bytes(value.permute(order) if strides else value)
        part = _Part(
            nbytes=data.numel(),
            device=value.device.type,
            dtype=value.dtype,
            shape=tuple(value.shape),
            strides=strides,
            requires_grad=value.requires_grad,
        )
        reduced = _left_out, (self._leave_out(part, data),)
        attributes = value.__dict__
        return (*reduced, attributes, None, None, _set_attributes) if attributes else reduced

    def _leave_out(self, part: _Part, data: torch.Tensor) -> int:
        self.parts.append(part)
        self.contents.append(data)
        return len(self.parts) - 1

    def _leave_out_array(self, buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if len(memory) < _SMALL_ARRAY_BYTES:
            return True  # in the pickle
        data = to_tensor(memory) if memory.readonly else torch.frombuffer(memory, dtype=torch.uint8)
        self._leave_out(_Part(nbytes=len(memory)), data)
        return False


class _Unpickler(Unpickler):
    """Puts the contents of tensors and arrays back."""

    def __init__(
        self, stream: bytes, definitions: Definitions, parts: Sequence[_Part], bulk: Mapping[str, torch.Tensor]
    ) -> None:
        starts = dict.fromkeys(bulk, 0)
        self._alone = len(parts) == 1
        self._parts: list[tuple[_Part, torch.Tensor]] = []
        for part in parts:
            start = starts[part.device]
            self._parts.append((part, bulk[part.device][start : start + part.nbytes]))
            starts[part.device] = start + _aligned(part.nbytes)
        arrays = [_array_memory(data) for part, data in self._parts if part.dtype is None]
        super().__init__(io.BytesIO(stream), definitions, buffers=arrays)

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - what pickle asks for
        if (module, name) == (__name__, _left_out.__name__):
            return self._tensor
        return super().find_class(module, name)

    def _tensor(self, index: int) -> torch.Tensor:
        part, data = self._parts[index]
        if part.dtype is None:
            raise PayloadTypeError("the value's parts are out of order")
        # A view would keep all parts alive, and save all of them when it is saved.
        owned = data if self._alone else data.clone()
        if part.strides:
            tensor = owned.view(part.dtype).as_strided(part.shape, part.strides)
        else:
            tensor = from_bytes(owned, part.dtype, part.shape)
        return tensor.requires_grad_(part.requires_grad)


def _left_out(index: int) -> torch.Tensor:
    """Stands in a pickle for a tensor that is not in it."""
    raise PayloadTypeError(f"tensor {index} of this pickle is not in it")


def _set_attributes(tensor: torch.Tensor, attributes: Mapping[str, object]) -> None:
    tensor.__dict__.update(attributes)


def _array_memory(data: torch.Tensor) -> Any:  # noqa: ANN401 - anything that has a buffer
    return memoryview(bytearray(memory_of(data)))


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return flat uint8 tensors as one, each beginning where any type can be read; no copy of a single one."""
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:
        return to_tensor(b"")
    whole = torch.zeros(sum(_aligned(piece.numel()) for piece in pieces), dtype=torch.uint8, device=pieces[0].device)
    start = 0
    for piece in pieces:
        whole[start : start + piece.numel()] = piece
        start += _aligned(piece.numel())
    return whole
