"""Collectives of short messages: part of the frames of the agreement, or sent by the backend in larger groups."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Final

import torch

from rankwise._comm.buffers import contents, to_tensor
from rankwise._comm.control.agreement import Agreement
from rankwise._comm.control.protocol import Call
from rankwise._comm.control.verdict import Combine
from rankwise._restricted_pickles import plain_loads

_LENGTH_BYTES: Final = 8


class ByteCollectives(Agreement):
    """Collectives of bytes; each message is at most a few kilobytes."""

    def all_gather_bytes(self, call: Call, message: bytes) -> list[bytes]:
        """Verify the call, and return the message of every member, by group rank; the lengths may differ."""
        members = range(self.size)
        verdict = self.agree(call, message, read=members)
        if verdict is None:
            return self.all_gather_unverified(message)
        return [verdict.bodies[member] for member in members]

    def reduce_bytes(self, call: Call, message: bytes, combine: Combine) -> bytes | None:
        """Verify the call, and return the combination of all messages, computed by one member; None without frames.

        Args:
            call: The call.
            message: The message of this member.
            combine: Computes the result from the messages, by group rank. Its error is raised on all members.
        """
        verdict = self.agree(call, message, combine=combine)
        return None if verdict is None else verdict.result

    def gather_bytes(
        self, call: Call, message: bytes, dst: int, combine: Combine | None = None
    ) -> tuple[list[bytes], bytes | None]:
        """Verify the call, and return the message of every member on group rank `dst`, none on the others.

        Also returns the combination of all messages, as `reduce_bytes` does; None in groups without frames.
        """
        own = self.require_member()
        members = range(self.size)
        verdict = self.agree(call, message, combine=combine, read=members if own == dst else ())
        if verdict is not None:
            return [verdict.bodies[member] for member in members] if own == dst else [], verdict.result
        if own != dst:
            self._send(message, dst)
            return [], None
        return [message if other == own else self._receive(other) for other in members], None

    def broadcast_bytes(self, call: Call, message: bytes, src: int) -> bytes:
        """Verify the call, and return the message of group rank `src`; the others' messages are ignored."""
        own = self.require_member()
        verdict = self.agree(call, message if own == src else b"", read=(src,))
        if verdict is not None:
            return verdict.bodies[src]
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self._transport.message_device)
        self._transport.broadcast(length, src)()
        data = (
            to_tensor(message) if own == src else torch.empty(_decoded_length(length), dtype=torch.uint8, device="cpu")
        )
        data = data.to(self._transport.message_device)
        self._transport.broadcast(data, src)()
        return contents(data)

    def scatter_bytes(self, call: Call, messages: Sequence[bytes], src: int) -> bytes:
        """Verify the call, and return the message of group rank `src` to this member."""
        own = self.require_member()
        verdict = self.agree(call, pickle.dumps(list(messages)) if own == src else b"", read=(src,))
        if verdict is not None:
            message: bytes = plain_loads(verdict.bodies[src])[own]
            return message
        if own != src:
            return self._receive(src)
        for other, message in enumerate(messages):
            if other != own:
                self._send(message, other)
        return messages[own]

    def all_gather_unverified(self, message: bytes) -> list[bytes]:
        """Return the message of every member, by group rank, without an agreement."""
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self._transport.message_device)
        lengths = [_decoded_length(other) for other in self._gathered(length)]
        own = to_tensor(message.ljust(max(lengths), b"\0")).to(self._transport.message_device)
        padded = self._gathered(own)
        return [contents(data)[:length] for data, length in zip(padded, lengths, strict=True)]

    def _gathered(self, data: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(data) for _ in range(self.size)]
        self._transport.all_gather(data, parts)()
        return parts

    def _send(self, message: bytes, dst: int) -> None:
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self._transport.message_device)
        data = to_tensor(message).to(self._transport.message_device)
        self._transport.transfer([(length, dst)], [])()
        if message:
            self._transport.transfer([(data, dst)], [])()

    def _receive(self, src: int) -> bytes:
        length = torch.empty(_LENGTH_BYTES, dtype=torch.uint8, device=self._transport.message_device)
        self._transport.transfer([], [(length, src)])()
        data = torch.empty(_decoded_length(length), dtype=torch.uint8, device=self._transport.message_device)
        if data.numel():
            self._transport.transfer([], [(data, src)])()
        return contents(data)


def _decoded_length(length: torch.Tensor) -> int:
    return int.from_bytes(contents(length), "little")
