"""Collectives with a root: gather and broadcast of any values.

Each begins with the frames by which ranks agree on the call. They carry the headers of the values, and the error of a
rank that failed. Values that do not fit into a header follow in buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeVar, overload

import torch

from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.memory_room import require_room, with_free_memory
from rankwise._collectives.non_blocking import start
from rankwise._collectives.placeholders import check_received
from rankwise._collectives.serialization import (
    Header,
    Serialized,
    buffer_devices,
    empty_buffers,
    serialize,
)
from rankwise._collectives.shared_values import Rest, SharedFiles
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Move
from rankwise._comm.data.planes import all_of
from rankwise._comm.group_rank import GroupRank
from rankwise._comm.work import Work
from rankwise._memory import require_available

T = TypeVar("T")

_FOLLOWING: Final = struct.Struct("<bqq")


@overload
def gather(
    value: T,
    *,
    dst: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: Literal[False] = ...,
) -> list[T] | None: ...
@overload
def gather(
    value: T,
    *,
    dst: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[list[T] | None]: ...
@overload
def gather(
    value: T,
    *,
    dst: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: bool,
) -> list[T] | Work[list[T] | None] | None: ...
def gather(
    value: T,
    *,
    dst: int | GroupRank = 0,
    group: GroupLike | None = None,
    async_op: bool = False,
) -> list[T] | Work[list[T] | None] | None:
    """Return every rank's value on one rank, in the order of ranks, and None on the others.

    Collective over the session, or over `group`. Values are as for `all_gather`.

    Args:
        value: This rank's value.
        dst: The global rank that receives the list, or a `GroupRank`.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: `dst` is not a member.
        PayloadTypeError: The value cannot be pickled.
        RemoteRankError: This error occurred on another rank.
        MismatchError: Another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> rankwise.gather(rankwise.get_rank() + 0.5)  # on 2 ranks: [0.5, 1.5] on rank 0, None on rank 1
        [0.5]
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, gather, value, dst=dst, async_op=async_op)
    with comm.call("gather") as call, SharedFiles(comm, to_all=False) as files:
        receiver = comm.group_rank_of(dst, "dst")
        call.settings = {"dst": comm.ranks[receiver]}
        payload = with_free_memory(serialize(value))
        # Every rank has to know what follows for any rank, since all agree once more before it moves.
        body = _Following.of(payload).encode() + payload.header.encode()
        messages, result = call.gather(body, receiver, _Following.combine)
        headers = [Header.decode(message[_FOLLOWING.size :]) for message in messages]
        buffers: list[dict[str, torch.Tensor]] = [{} for _ in headers]
        following = _Following.decode(result)
        rest = Rest.EVERYTHING if following.has_buffers else Rest.NOTHING
        if following.file_bytes:
            require_room(call, following.file_bytes, [following.free])
            rest = files.deliver(call, [payload], headers, range(len(headers)), buffers)
        if rest is not Rest.NOTHING:
            remaining = [rest.of(header) for header in headers]
            own = rest.of(payload)
            call.run_prepared(lambda: _gather_buffers(comm, receiver, own, remaining, buffers))
    if comm.rank != receiver:
        return None
    return files.values(headers, buffers)


@overload
def broadcast(
    value: T,
    *,
    src: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: Literal[False] = ...,
) -> T: ...
@overload
def broadcast(
    value: T,
    *,
    src: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[T]: ...
@overload
def broadcast(
    value: T,
    *,
    src: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: bool,
) -> T | Work[T]: ...
def broadcast(
    value: T,
    *,
    src: int | GroupRank = 0,
    group: GroupLike | None = None,
    async_op: bool = False,
) -> T | Work[T]:
    """Return one rank's value on all ranks.

    Collective over the session, or over `group`. Values are as for `all_gather`.

    Args:
        value: On `src`, the value to send; ignored on the other ranks, where it may be None. But if it has tensors
            there, their number and the kinds of containers around them have to be those of the result.
        src: The global rank whose value is sent, or a `GroupRank`.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: `src` is not a member.
        PayloadTypeError: The value cannot be pickled.
        RemoteRankError: This error occurred on `src`.
        MismatchError: Another rank calls another collective, or passes another `src`; or this rank has passed other
            tensors than it received.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> rankwise.broadcast({"seed": 7 + rankwise.get_rank()})  # {'seed': 7} on every rank
        {'seed': 7}
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, broadcast, value, src=src, async_op=async_op)
    with comm.call("broadcast") as call, SharedFiles(comm, to_all=True) as files:
        sender = comm.group_rank_of(src, "src")
        call.settings = {"src": comm.ranks[sender]}
        payload = with_free_memory(serialize(value)) if comm.rank == sender else None
        message = call.broadcast(b"" if payload is None else payload.header.encode(), sender)
        header = Header.decode(message)
        buffers: dict[str, torch.Tensor] = {}
        rest = Rest.before([header])
        if header.file_bytes:
            require_room(call, header.file_bytes, [header.free])
            rest = files.deliver(call, [] if payload is None else [payload], [header], [sender], [buffers])

        def prepare() -> Move:
            received = empty_buffers(rest.of(header), comm) if payload is None else rest.of(payload).copy()
            buffers.update(received)
            return all_of([comm.planes.broadcast(data, sender) for data in received.values()])

        if rest is not Rest.NOTHING:
            call.run_prepared(prepare)
    result: T
    [result] = files.values([header], [buffers])
    if comm.rank != sender:
        check_received(value, result, call.text)
    return result


class _Following(NamedTuple):
    """What follows the headers of a gather, for one member or for all.

    Attributes:
        has_buffers: There are buffers.
        file_bytes: The length of the values that go through files.
        free: The bytes of memory that their hosts have left, the least of them; 0 if that is not known.
    """

    has_buffers: int
    file_bytes: int
    free: int

    @classmethod
    def of(cls, payload: Serialized) -> _Following:
        return cls(bool(payload.pieces), payload.header.file_bytes, payload.header.free)

    def encode(self) -> bytes:
        return _FOLLOWING.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> _Following:
        return cls(*_FOLLOWING.unpack_from(data))

    @classmethod
    def combine(cls, messages: Sequence[bytes]) -> bytes:
        """Return what follows for all members, given messages that begin with it."""
        buffers, lengths, free = zip(*map(cls.decode, messages), strict=True)
        return cls(max(buffers), sum(lengths), min(filter(None, free), default=0)).encode()


def _gather_buffers(
    comm: Comm,
    dst: int,
    payload: Serialized,
    headers: Sequence[Header],
    buffers: Sequence[dict[str, torch.Tensor]],
) -> Move:
    """Prepare to gather buffers on the member with group rank `dst`, which alone has the headers."""
    if comm.rank != dst:
        return all_of([comm.planes.transfer([(data, dst)], []) for data in payload.buffers.values()])
    require_available(sum(header.sizes.get("cpu", 0) for header in headers))
    for member, (header, parts) in enumerate(zip(headers, buffers, strict=True)):
        parts.update(payload.copy() if member == dst else empty_buffers(header, comm))
    moves = []
    for device in buffer_devices(headers):
        incoming = [
            (buffers[member][device], member)
            for member, header in enumerate(headers)
            if member != dst and device in header.sizes
        ]
        moves.append(comm.planes.transfer([], incoming))
    return all_of(moves)
