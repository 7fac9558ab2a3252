"""all_to_all: every rank sends a value of its own to every other rank.

The ranks first exchange the headers of all values. A header that is the same for several ranks, as that of tensors of
one shape, is sent once; and small values share the bytes that one small value has in other collectives. So the message
does not become n times as long in a group of n ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar, overload

import torch

from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.non_blocking import start
from rankwise._collectives.serialization import (
    Header,
    Serialized,
    buffer_devices,
    deserialize,
    empty_buffers,
)
from rankwise._collectives.values_per_rank import serialize_each
from rankwise._comm.buffers import to_tensor
from rankwise._comm.comm import INLINE_BYTES, Comm
from rankwise._comm.control.call import Move
from rankwise._comm.data.planes import all_of
from rankwise._comm.work import Work

T = TypeVar("T")

# The length of the message above which the pickles of values with buffers are sent with these buffers.
_MOST_MESSAGE_BYTES: Final = 2 * INLINE_BYTES


@overload
def all_to_all(
    values: torch.Tensor, *, group: GroupLike | None = ..., async_op: Literal[False] = ...
) -> list[torch.Tensor]: ...
@overload
def all_to_all(values: Sequence[T], *, group: GroupLike | None = ..., async_op: Literal[False] = ...) -> list[T]: ...
@overload
def all_to_all(
    values: torch.Tensor, *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[list[torch.Tensor]]: ...
@overload
def all_to_all(values: Sequence[T], *, group: GroupLike | None = ..., async_op: Literal[True]) -> Work[list[T]]: ...
@overload
def all_to_all(
    values: torch.Tensor, *, group: GroupLike | None = ..., async_op: bool
) -> list[torch.Tensor] | Work[list[torch.Tensor]]: ...
@overload
def all_to_all(values: Sequence[T], *, group: GroupLike | None = ..., async_op: bool) -> list[T] | Work[list[T]]: ...
def all_to_all(
    values: Sequence[Any] | torch.Tensor, *, group: GroupLike | None = None, async_op: bool = False
) -> list[Any] | Work[list[Any]]:
    """Return the values that the ranks pass for this rank, in the order of ranks.

    Collective over the session, or over `group`. Values are as for `all_gather`: tensors of any dtype and shape, or any
    objects that can be pickled. Only what a rank receives is sent to it, without padding.

    Args:
        values: One value for each member, in the order of ranks, or a tensor or array with one row for each.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: The number of values is not the number of members.
        PayloadTypeError: A value cannot be pickled.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: Another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> rank, world_size = rankwise.get_rank(), rankwise.get_world_size()
        >>> rankwise.all_to_all([f"{rank} to {other}" for other in range(world_size)])  # rank 1: ['0 to 1', '1 to 1']
        ['0 to 0']
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, all_to_all, values, async_op=async_op)
    with comm.call("all_to_all") as call:
        rank = call.rank
        payloads = serialize_each(values, comm.size, call.operation, most_inline=INLINE_BYTES // comm.size)
        message = _encode(payloads)
        if len(message) > _MOST_MESSAGE_BYTES:
            payloads = [payload.with_short_header() for payload in payloads]
            message = _encode(payloads)
        messages = call.all_gather(message)
        tables = [pickle.loads(one) for one in messages]
        headers = [Header.decode(table[rank]) for table in tables]
        buffers: list[dict[str, torch.Tensor]] = [{} for _ in headers]
        # Every rank has all headers, so all know whether any rank sends buffers.
        devices = buffer_devices([Header.decode(header) for table in tables for header in set(table)])
        if devices:
            call.run_prepared(lambda: _exchange_buffers(comm, rank, devices, payloads, headers, buffers))
    return [deserialize(header, parts) for header, parts in zip(headers, buffers, strict=True)]


def _encode(payloads: Sequence[Serialized]) -> bytes:
    """Return the message with the headers of all values; equal ones are one object, which pickle writes once."""
    distinct: dict[bytes, bytes] = {}
    headers = [payload.header.encode() for payload in payloads]
    return pickle.dumps([distinct.setdefault(header, header) for header in headers])


def _exchange_buffers(
    comm: Comm,
    rank: int,
    devices: Sequence[str],
    payloads: Sequence[Serialized],
    headers: Sequence[Header],
    buffers: Sequence[dict[str, torch.Tensor]],
) -> Move:
    """Prepare to send each member the buffers of its value, and to receive those of the values for this rank."""
    for member, (header, parts) in enumerate(zip(headers, buffers, strict=True)):
        parts.update(payloads[rank].copy() if member == rank else empty_buffers(header, comm))
    nothing = to_tensor(b"")
    moves = [
        comm.planes.all_to_all(
            [payload.buffers.get(device, nothing) for payload in payloads],
            [parts.get(device, nothing) for parts in buffers],
        )
        for device in devices
    ]
    return all_of(moves)
