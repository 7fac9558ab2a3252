"""The check that large values fit into the memory of their hosts, before any rank allocates it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from rankwise._collectives.serialization import Serialized
from rankwise._comm.control.call import Call
from rankwise._memory import memory_of_host

# Values of this size and more tell how much memory their host has left: to read that takes some time.
_REPORTED_BYTES: Final = 1 << 23


def with_free_memory(payload: Serialized) -> Serialized:
    """Return a value whose header tells how much memory its host has left, if it is large."""
    if payload.header.file_bytes < _REPORTED_BYTES:
        return payload
    return replace(payload, header=replace(payload.header, free=memory_of_host()))


def require_room(call: Call, nbytes: int, free: Iterable[int]) -> None:
    """Check that values fit into the memory of their hosts, before any member allocates it.

    All members check the same, after the agreement on the call.

    Args:
        call: The call.
        nbytes: The length of all values that go through files.
        free: The bytes of memory that each sender's host has left; 0 if that is not known.

    Raises:
        MemoryError: They do not fit.
    """
    least = min(filter(None, free), default=nbytes)
    if nbytes > least:
        text = f"{nbytes} bytes of values do not fit into the {least} bytes of memory that are free on a host"
        call.fail_everywhere(MemoryError(text))
