"""Values through files in memory, which the members of a group on one host map.

A member writes each value that it sends to a file, and its header refers to the file. Those that receive the value map
the file after the agreement on the call. All agree once more, when all have mapped what they receive: then the files
are closed. What cannot be delivered like this, and what is too small for a file, is moved by the data planes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from typing import Any, Final, TypeVar

import torch

from rankwise._collectives.safe_values import is_safe
from rankwise._collectives.serialization import Header, Serialized, deserialize
from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.control.shared_file import map_file

_Message = TypeVar("_Message", Header, Serialized)

# Errors after which there is no use in trying another way, which takes more memory.
_NO_MEMORY: Final = frozenset({errno.ENOMEM, errno.ENOSPC})


class Rest(Enum):
    """What remains to be moved by the data planes."""

    NOTHING = b"0"
    OTHER_BUFFERS = b"1"
    EVERYTHING = b"2"

    def of(self, message: _Message) -> _Message:
        """Return what remains of a header, or of a value."""
        return message if self is Rest.EVERYTHING else message.without_file()

    @classmethod
    def before(cls, headers: Sequence[Header]) -> Rest:
        """Return what remains before any is delivered."""
        return cls.EVERYTHING if any(header.sizes for header in headers) else cls.NOTHING

    @classmethod
    def after(cls, headers: Sequence[Header], *, is_delivered: bool) -> Rest:
        """Return what remains of values whose files are delivered, or not."""
        if not is_delivered:
            return cls.EVERYTHING
        return cls.OTHER_BUFFERS if any(header.without_file().sizes for header in headers) else cls.NOTHING

    @classmethod
    def of_all(cls, answers: Iterable[bytes]) -> Rest:
        """Return what remains of the call, given what remains for each member."""
        return cls(max(answers))


class SharedFiles(ExitStack):
    """The files of this member in one collective, in a block at whose end they are closed."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self._comm = comm
        self._unpickled: list[Any] | None = None

    def offer(self, payload: Serialized) -> Serialized:
        """Return a value with a file in its header, if it needs one, and the members can map it. Local.

        Raises:
            MemoryError: There is no memory for the file.
        """
        if not (payload.header.needs_file and self._can_share()):
            return payload
        try:
            file = payload.write_file()
        except OSError as error:
            require_memory(error, payload.header.sizes["cpu"])
            return payload
        self.callback(file.close)
        return replace(payload, header=replace(payload.header, file=file.reference))

    def deliver(
        self,
        call: Call,
        headers: Sequence[Header],
        buffers: Sequence[dict[str, torch.Tensor]],
        senders: Sequence[int] = (),  # noqa: ARG002 - for several hosts
    ) -> Rest:
        """Map the files of the values that this member receives, and return what remains to be moved.

        Collective over the members, which have agreed on the call. All get the same result.

        Args:
            call: The call.
            headers: The headers of the values that this member receives.
            buffers: The buffers of each, to which those that are mapped are added.
            senders: If all members receive all values, the group rank of the sender of each.

        Raises:
            MemoryError: There is no memory for a map.
            PayloadTypeError: A value cannot be unpickled here.
        """
        if not self._can_share():
            return Rest.EVERYTHING
        call.begin_data()
        mapped = [mapped_file(header) for header in headers]
        rest = Rest.after(headers, is_delivered=not missing(headers, mapped))
        if rest is Rest.NOTHING and not is_safe(call):
            self._unpickle(headers, mapped)
        rest = Rest.of_all(self._comm.all_gather_bytes(call, rest.value))
        if rest is not Rest.EVERYTHING:
            add_mapped(buffers, mapped)
        return rest

    def values(
        self, headers: Sequence[Header], buffers: Sequence[dict[str, torch.Tensor]], *, safe: bool = False
    ) -> list[Any]:
        """Return the values, unpickled now unless they are already. Local.

        Args:
            headers: The headers.
            buffers: The buffers of each.
            safe: As for `deserialize`.

        Raises:
            PayloadTypeError: A value cannot be unpickled here.
        """
        if self._unpickled is None:
            return [deserialize(header, received, safe=safe) for header, received in zip(headers, buffers, strict=True)]
        return self._unpickled

    def _unpickle(self, headers: Sequence[Header], mapped: Sequence[torch.Tensor | None]) -> None:
        """Unpickle the values before the last agreement, so that an error is one on all members."""
        buffers: list[dict[str, torch.Tensor]] = [{} for _ in headers]
        add_mapped(buffers, mapped)
        self._unpickled = self.values(headers, buffers)

    def _can_share(self) -> bool:
        """Return whether the members can map each other's files, as far as is known: the same on all of them."""
        return self._comm.shared_memory is not None


def mapped_file(header: Header) -> torch.Tensor | None:
    """Map the file of a value; None if there is none, or it cannot be opened."""
    if header.file is None:
        return None
    try:
        return map_file(header.file)
    except OSError as error:
        require_memory(error, header.sizes["cpu"])
        return None


def missing(headers: Sequence[Header], mapped: Sequence[torch.Tensor | None]) -> bool:
    """Return whether a value needs a file that is not mapped."""
    return any(header.needs_file and data is None for header, data in zip(headers, mapped, strict=True))


def add_mapped(buffers: Sequence[dict[str, torch.Tensor]], mapped: Sequence[torch.Tensor | None]) -> None:
    """Add what is mapped to the buffers of each value."""
    for received, data in zip(buffers, mapped, strict=True):
        received.update({} if data is None else {"cpu": data})


def require_memory(error: OSError, nbytes: int) -> None:
    """Raise if an error says that there is no memory."""
    if error.errno in _NO_MEMORY:
        raise MemoryError(f"there is no memory for {nbytes} bytes of a value: {error}") from error
