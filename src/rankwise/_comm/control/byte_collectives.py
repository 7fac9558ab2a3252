"""Collectives of short messages: part of the frames of the agreement, or sent by the backend in larger groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from rankwise._comm.buffers import contents, to_tensor
from rankwise._comm.control.agreement import ControlPlane
from rankwise._comm.control.protocol import Call

_LENGTH_BYTES: Final = 8


class ByteCollectives(ControlPlane):
    """Collectives of bytes; each message is at most a few kilobytes."""

    def all_gather_bytes(self, call: Call, message: bytes) -> list[bytes]:
        """Verify the call, and return the message of every member, by group rank; the lengths may differ."""
        messages = self.verify(call, message)
        return self.all_gather_unverified(message) if messages is None else messages

    def gather_bytes(self, call: Call, message: bytes, dst: int, *, note: bytes = b"") -> list[bytes] | None:
        """Verify the call, and return the message of every member on group rank `dst`.

        The other members get the note of every member if the group uses frames, and None in larger groups.
        """
        own = self.require_member()
        messages = self._verify(call, [message if other == dst else note for other in range(self.size)])
        if messages is not None:
            return messages
        if own != dst:
            self._send(message, dst)
            return None
        return [message if other == own else self._receive(other) for other in range(self.size)]

    def broadcast_bytes(self, call: Call, message: bytes, src: int) -> bytes:
        """Verify the call, and return the message of group rank `src`; the others' messages are ignored."""
        own = self.require_member()
        messages = self._verify(call, [message if own == src else b""] * self.size)
        if messages is not None:
            return messages[src]
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self.control_device)
        self._broadcast(length, src)()
        data = (
            to_tensor(message) if own == src else torch.empty(_decoded_length(length), dtype=torch.uint8, device="cpu")
        )
        data = data.to(self.control_device)
        self._broadcast(data, src)()
        return contents(data)

    def scatter_bytes(self, call: Call, messages: Sequence[bytes], src: int) -> bytes:
        """Verify the call, and return the message of group rank `src` to this member."""
        own = self.require_member()
        received = self._verify(call, messages if own == src else [b""] * self.size)
        if received is not None:
            return received[src]
        if own != src:
            return self._receive(src)
        for other, message in enumerate(messages):
            if other != own:
                self._send(message, other)
        return messages[own]

    def all_gather_unverified(self, message: bytes) -> list[bytes]:
        """Return the message of every member, by group rank, without an agreement."""
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self.control_device)
        lengths = [_decoded_length(other) for other in self._all_gather(length)()]
        padded = self._all_gather(to_tensor(message.ljust(max(lengths), b"\0")).to(self.control_device))()
        return [contents(data)[:length] for data, length in zip(padded, lengths, strict=True)]

    def _send(self, message: bytes, dst: int) -> None:
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self.control_device)
        data = to_tensor(message).to(self.control_device)
        self._transfer([(length, dst)], [])()
        if message:
            self._transfer([(data, dst)], [])()

    def _receive(self, src: int) -> bytes:
        length = torch.empty(_LENGTH_BYTES, dtype=torch.uint8, device=self.control_device)
        self._transfer([], [(length, src)])()
        data = torch.empty(_decoded_length(length), dtype=torch.uint8, device=self.control_device)
        if data.numel():
            self._transfer([], [(data, src)])()
        return contents(data)


def _decoded_length(length: torch.Tensor) -> int:
    return int.from_bytes(contents(length), "little")
