"""Messages between members: in the frames that they agree with, where these go to every member, else by the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from rankwise._comm.buffers import contents, to_tensor
from rankwise._comm.control.agreement import ControlPlane
from rankwise._comm.control.protocol import Call

_LENGTH_BYTES: Final = 8


class ByteCollectives(ControlPlane):
    """Members that have something to say to each other; each message is at most a few kilobytes."""

    def all_gather_bytes(self, call: Call, message: bytes) -> list[bytes]:
        """Agree, and return every member's message, in the members' order; they may differ in length."""
        messages = self.verify(call, message)
        return self.all_gather_unverified(message) if messages is None else messages

    def gather_bytes(self, call: Call, message: bytes, dst: int, *, note: bytes = b"") -> list[bytes] | None:
        """Agree, and return every member's message on the one at place `dst`.

        On the others every member's note, where frames can carry it, and None in larger groups.
        """
        me = self.require_member()
        messages = self._verify(call, [message if place == dst else note for place in range(self.size)])
        if messages is not None:
            return messages
        if me != dst:
            self._send(message, dst)
            return None
        return [message if place == me else self._receive(place) for place in range(self.size)]

    def broadcast_bytes(self, call: Call, message: bytes, src: int) -> bytes:
        """Agree, and return the message of the member at place `src`; the others' are not looked at."""
        me = self.require_member()
        messages = self._verify(call, [message if me == src else b""] * self.size)
        if messages is not None:
            return messages[src]
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self.control_device)
        self._broadcast(length, src)()
        data = to_tensor(message) if me == src else torch.empty(_number(length), dtype=torch.uint8, device="cpu")
        data = data.to(self.control_device)
        self._broadcast(data, src)()
        return contents(data)

    def scatter_bytes(self, call: Call, messages: Sequence[bytes], src: int) -> bytes:
        """Agree, and return the message that the member at place `src` has for this one."""
        me = self.require_member()
        delivered = self._verify(call, messages if me == src else [b""] * self.size)
        if delivered is not None:
            return delivered[src]
        if me != src:
            return self._receive(src)
        for place, message in enumerate(messages):
            if place != me:
                self._send(message, place)
        return messages[me]

    def all_gather_unverified(self, message: bytes) -> list[bytes]:
        """Return every member's message, in the members' order, without agreeing first."""
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self.control_device)
        lengths = [_number(other) for other in self._all_gather(length)()]
        padded = self._all_gather(to_tensor(message.ljust(max(lengths), b"\0")).to(self.control_device))()
        return [contents(data)[:length] for data, length in zip(padded, lengths, strict=True)]

    def _send(self, message: bytes, place: int) -> None:
        length = to_tensor(len(message).to_bytes(_LENGTH_BYTES, "little")).to(self.control_device)
        data = to_tensor(message).to(self.control_device)
        self._transfer([(length, place)], [])()
        if message:
            self._transfer([(data, place)], [])()

    def _receive(self, place: int) -> bytes:
        length = torch.empty(_LENGTH_BYTES, dtype=torch.uint8, device=self.control_device)
        self._transfer([], [(length, place)])()
        data = torch.empty(_number(length), dtype=torch.uint8, device=self.control_device)
        if data.numel():
            self._transfer([], [(data, place)])()
        return contents(data)


def _number(length: torch.Tensor) -> int:
    return int.from_bytes(contents(length), "little")
