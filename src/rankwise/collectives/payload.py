"""How any value travels: a short header, and a buffer of bytes. Tensors keep type, shape and kind of device."""

from __future__ import annotations

import pickle
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rankwise.comm.comm import Comm, as_bytes, contents, from_bytes
from rankwise.errors import PayloadTypeError, RankwiseError, RemoteRankError


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a rank says of its value before it sends it.

    Attributes:
        dtype: The tensor's type, or None for a pickled object.
        shape: The tensor's shape.
        device_type: The kind of device the tensor is on.
        nbytes: The length of the buffer.
        number: A number that is to be reduced; it travels in the header.
        error: The traceback of what this rank raised instead, or "".
        host: This rank's host, with an error.
    """

    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    device_type: str = "cpu"
    nbytes: int = 0
    number: Any = None
    error: str = ""
    host: str = ""

    def encode(self) -> bytes:
        return pickle.dumps(self)

    @staticmethod
    def decode(data: bytes) -> Header:
        header: Header = pickle.loads(data)
        return header

    @classmethod
    def failed(cls, error: Exception) -> Header:
        """Return the header that tells the other ranks of an error on this one."""
        return cls(error="".join(traceback.format_exception(error)), host=socket.gethostname())


@dataclass(frozen=True, slots=True)
class Payload:
    """A value ready to travel: `buffer` is a flat uint8 tensor, on the value's own device if that is a tensor."""

    header: Header
    buffer: torch.Tensor


def pack(value: Any) -> Payload:  # noqa: ANN401 - any value of the user's
    """Make a value ready to travel.

    Raises:
        PayloadTypeError: It cannot be pickled.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not (value.is_quantized or value.is_meta):
        buffer = as_bytes(value)
        header = Header(
            dtype=value.dtype, shape=tuple(value.shape), device_type=value.device.type, nbytes=buffer.numel()
        )
        return Payload(header, buffer)
    try:
        pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise PayloadTypeError(
            f"a {type(value).__qualname__} cannot travel between ranks, for it cannot be pickled: {error}"
        ) from error
    return Payload(Header(nbytes=len(pickled)), torch.frombuffer(bytearray(pickled), dtype=torch.uint8))


def unpack(payload: Payload) -> Any:  # noqa: ANN401 - any value of the user's
    """Return the value. It owns the buffer."""
    header = payload.header
    if header.dtype is not None:
        return from_bytes(payload.buffer, header.dtype, header.shape)
    return pickle.loads(contents(payload.buffer))


def room_for(header: Header, comm: Comm) -> torch.Tensor:
    """Return an empty buffer for a value from another rank: on this rank's device if the value is on the like of it."""
    device = comm.device if header.device_type == comm.device.type else torch.device("cpu")
    return torch.empty(header.nbytes, dtype=torch.uint8, device=device)


def attempt(value: Any) -> Payload | PayloadTypeError:  # noqa: ANN401 - any value of the user's
    """Make a value ready to travel, or return the error that the other ranks must hear of first."""
    try:
        return pack(value)
    except PayloadTypeError as error:
        return error


def header_of(payload: Payload | RankwiseError) -> Header:
    """Return what to say of a payload, or of the error in its place."""
    return payload.header if isinstance(payload, Payload) else Header.failed(payload)


def agreed(payload: Payload | RankwiseError, headers: Sequence[Header], ranks: Sequence[int]) -> Payload:
    """Return this rank's payload, after the headers of all were heard.

    Raises:
        RankwiseError: `payload`, if it is one.
        RemoteRankError: A header tells of an error on the rank at its place.
    """
    if isinstance(payload, RankwiseError):
        raise payload
    for rank, header in zip(ranks, headers, strict=True):
        if header.error:
            raise RemoteRankError(rank=rank, host=header.host, traceback=header.error)
    return payload
