"""The agreement of a group whose members exchange no frames: a data plane compares the digests of their calls.

So do groups of more than 64 ranks on several hosts. The cost of a call does not grow with the number of members.
"""

from __future__ import annotations

import pickle
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

from rankwise._comm.buffers import contents, to_tensor
from rankwise._comm.control.protocol import Description, mismatch_error, read_report
from rankwise._comm.reduce_ops import Op
from rankwise.errors import RemoteRankError

_DIGEST_WORDS: Final = struct.Struct("<2q")
_LENGTH_BYTES: Final = 8


class Transport(Protocol):
    """The operations of a data plane that are used here."""

    message_device: torch.device

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> Callable[[], None]: ...
    def all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Callable[[], None]: ...
    def broadcast(self, data: torch.Tensor, src: int) -> Callable[[], None]: ...
    def transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Callable[[], None]: ...


class Digests:
    """The agreement of the members on a call, and their short messages after it."""

    def __init__(self, ranks: Sequence[int], transport: Transport) -> None:
        self._ranks = ranks
        self._transport = transport

    def verify(self, call: Description, failure: RemoteRankError | None = None) -> None:
        """Wait until every member has made the same call, or has reported a failure.

        Raises:
            MismatchError: The calls differ.
            RemoteRankError: A member has failed.
        """
        # A failed rank takes part with a random digest: the mismatch makes all members exchange details.
        words = _DIGEST_WORDS.unpack(call.digest() if failure is None else secrets.token_bytes(_DIGEST_WORDS.size))
        # The minimum of a word, and of its complement, gives the least and the greatest word in one reduction.
        least = torch.tensor([*words, *(~word for word in words)], device=self._transport.message_device)
        self._transport.all_reduce(least, Op.MIN)()
        first, second, not_first, not_second = least.tolist()
        if (first, second) != (~not_first, ~not_second):
            answers = self.all_gather(pickle.dumps(call.details(failure)))
            raise mismatch_error(self._ranks, [read_report(answer) for answer in answers])

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return the message of every member, by group rank."""
        lengths = [_length(other) for other in self._gathered(self._tensor(_encoded_length(message)))]
        padded = self._gathered(self._tensor(message.ljust(max(lengths), b"\0")))
        return [contents(data)[:length] for data, length in zip(padded, lengths, strict=True)]

    def broadcast(self, message: bytes, src: int, *, is_sender: bool) -> bytes:
        """Return the message of group rank `src`."""
        length = self._tensor(_encoded_length(message))
        self._transport.broadcast(length, src)()
        data = self._tensor(message) if is_sender else self._empty(_length(length))
        self._transport.broadcast(data, src)()
        return contents(data)

    def send(self, message: bytes, dst: int) -> None:
        """Send a message to one member."""
        self._transport.transfer([(self._tensor(_encoded_length(message)), dst)], [])()
        if message:
            self._transport.transfer([(self._tensor(message), dst)], [])()

    def receive(self, src: int) -> bytes:
        """Return the message of one member."""
        length = self._empty(_LENGTH_BYTES)
        self._transport.transfer([], [(length, src)])()
        data = self._empty(_length(length))
        if data.numel():
            self._transport.transfer([], [(data, src)])()
        return contents(data)

    def _gathered(self, data: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(data) for _ in self._ranks]
        self._transport.all_gather(data, parts)()
        return parts

    def _tensor(self, data: bytes) -> torch.Tensor:
        return to_tensor(data).to(self._transport.message_device)

    def _empty(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self._transport.message_device)


def _encoded_length(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little")


def _length(encoded: torch.Tensor) -> int:
    return int.from_bytes(contents(encoded), "little")
