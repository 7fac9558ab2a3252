"""Values that other ranks receive as from the original: as if by `pickle.loads(pickle.dumps(value))`.

In rankwise's own collectives a slice is received with the strides of its clone, a read-only array stays read-only, and
a class that `__main__` defines differently on the receiving rank is unpickled by value. Here strides are kept, arrays
are writable, and a class is the one that `__main__` defines under its name. Values that pickle refuses, such as
lambdas, are sent all the same.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from rankwise.errors import PayloadTypeError
from rankwise.extend._dropins import Definitions, Pickler, Unpickler

# The protocol of `pickle.dumps` up to Python 3.13: it copies arrays into the pickle, so they are writable when read.
_PROTOCOL: Final = 4


def with_pickle_semantics(value: Any) -> Any:  # noqa: ANN401 - anything
    """Return an object that other ranks receive as the unpickled value; the value itself if it cannot be pickled.

    Local. In that case the collective raises the reason, on all ranks.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
        return _Pickled(stream.getvalue(), pickler.memories, Definitions.of(pickler.referenced))
    except Exception:  # noqa: BLE001 - a user's class may raise any exception when it is pickled
        return value


class _Pickled:
    """A value that is pickled already. The memory of its tensors is sent like that of other tensors."""

    def __init__(self, pickled: bytes, memories: Sequence[torch.Tensor], definitions: Definitions) -> None:
        self._parts = pickled, memories, *definitions

    def __reduce__(self) -> tuple[object, ...]:
        return _read, self._parts


class _Pickler(Pickler):
    """A pickler that keeps the strides of tensors, and leaves their memory out of the pickle.

    Attributes:
        memories: The memory of each tensor from its first element to its last, without the rest of a larger tensor.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self.memories: list[torch.Tensor] = []
        super().__init__(file, protocol=_PROTOCOL)

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any value of the user's
        if type(value) is not torch.Tensor or not _is_plain(value):
            return super().reducer_override(value)
        self.memories.append(_memory_of(value))
        index = len(self.memories) - 1
        reduced = _tensor, (index, tuple(value.shape), value.stride(), value.requires_grad)
        return (*reduced, value.__dict__, None, None, _set_attributes) if value.__dict__ else reduced


class _Unpickler(Unpickler):
    """An unpickler for the pickles of `_Pickler`, given the memory of tensors."""

    def __init__(self, pickled: bytes, memories: Sequence[torch.Tensor], definitions: Definitions) -> None:
        super().__init__(io.BytesIO(pickled), definitions)
        self._memories = memories

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - any global object
        if (module, name) == (__name__, _tensor.__name__):
            return self._tensor
        return super().find_class(module, name)

    def _tensor(
        self,
        index: int,
        shape: Sequence[int],
        strides: Sequence[int],
        requires_grad: bool,
    ) -> torch.Tensor:
        return self._memories[index].as_strided(shape, strides).requires_grad_(requires_grad)

    def _named(self, name: str, fingerprint: str) -> Any:  # noqa: ANN401 - any function or class
        try:
            return self.find_class("__main__", name)
        except AttributeError:
            return super()._named(name, fingerprint)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether memory, shape and strides determine a tensor. Others are pickled by torch."""
    odd = tensor.is_quantized or tensor.is_meta or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not odd


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from a tensor's first element to its last, as a flat tensor; no copy."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span if tensor.numel() else 0,), (1,))


def _read(pickled: bytes, memories: Sequence[torch.Tensor], definitions: bytes, problem: str) -> Any:  # noqa: ANN401
    """Return the value of a `_Pickled` with these parts."""
    return _Unpickler(pickled, memories, Definitions(definitions, problem)).load()


def _tensor(*_: object) -> torch.Tensor:
    """The name in a pickle that `_Unpickler` replaces by its method `_tensor`."""
    raise PayloadTypeError("the tensors of this pickle are not in it")


def _set_attributes(tensor: torch.Tensor, attributes: Mapping[str, object]) -> None:
    tensor.__dict__.update(attributes)
