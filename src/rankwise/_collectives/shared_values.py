"""Values through files in memory, which the members of a group on one host map.

A member writes each value that it sends to a file, and its header refers to the file. Those that receive the value map
the file after the agreement on the call. All agree once more, when all have mapped what they receive: then the files
are closed. What cannot be delivered like this is moved by the data planes.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from typing import Final, TypeVar

import torch

from rankwise._collectives.serialization import Header, Serialized
from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.control.shared_file import map_file

_Message = TypeVar("_Message", Header, Serialized)

# Errors after which there is no use in trying another way, which takes more memory.
_NO_MEMORY: Final = frozenset({errno.ENOMEM, errno.ENOSPC})


class Rest(Enum):
    """What remains to be moved by the data planes."""

    NOTHING = b"0"
    ACCELERATORS = b"1"
    EVERYTHING = b"2"

    def of(self, message: _Message) -> _Message:
        """Return what remains of a header, or of a value."""
        return message if self is Rest.EVERYTHING else message.without_host()


class SharedFiles(ExitStack):
    """The files of this member in one collective, in a block at whose end they are closed."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self._comm = comm

    def offer(self, payload: Serialized) -> Serialized:
        """Return a value with a file in its header, if it needs one, and the members can map it. Local.

        Raises:
            MemoryError: There is no memory for the file.
        """
        if "cpu" not in payload.pieces or self._comm.shared_memory is None:
            return payload
        try:
            file = payload.write_file()
        except OSError as error:
            _require_memory(error, payload.header.sizes["cpu"])
            return payload
        self.callback(file.close)
        return replace(payload, header=replace(payload.header, file=file.reference))

    def deliver(self, call: Call, headers: Sequence[Header], buffers: Sequence[dict[str, torch.Tensor]]) -> Rest:
        """Map the CPU buffers of the values that this member receives, and return what remains to be moved.

        Collective over the members, which have agreed on the call. All get the same result.

        Args:
            call: The call.
            headers: The headers of the values that this member receives.
            buffers: The buffers of each, to which those that are mapped are added.

        Raises:
            MemoryError: There is no memory for a map.
        """
        if self._comm.shared_memory is None:
            return Rest.EVERYTHING
        call.begin_data()
        mapped = [_mapped(header) for header in headers]
        rests = [_rest(header, data) for header, data in zip(headers, mapped, strict=True)]
        own = max(rests, key=_order, default=Rest.NOTHING)
        answers = self._comm.all_gather_bytes(call, own.value)
        rest = max(map(Rest, answers), key=_order)
        if rest is not Rest.EVERYTHING:
            for received, data in zip(buffers, mapped, strict=True):
                received.update({} if data is None else {"cpu": data})
        return rest


def _mapped(header: Header) -> torch.Tensor | None:
    """Map the file of a value; None if there is none, or it cannot be opened."""
    if header.file is None:
        return None
    try:
        return map_file(header.file)
    except OSError as error:
        _require_memory(error, header.sizes["cpu"])
        return None


def _rest(header: Header, data: torch.Tensor | None) -> Rest:
    if "cpu" in header.sizes and data is None:
        return Rest.EVERYTHING
    return Rest.ACCELERATORS if header.without_host().sizes else Rest.NOTHING


def _order(rest: Rest) -> bytes:
    return rest.value


def _require_memory(error: OSError, nbytes: int) -> None:
    """Raise if an error says that there is no memory."""
    if error.errno in _NO_MEMORY:
        raise MemoryError(f"there is no memory for {nbytes} bytes of a value: {error}") from error
