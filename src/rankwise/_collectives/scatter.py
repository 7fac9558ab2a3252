"""The values of one rank, one for each rank: scatter."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Literal, TypeVar, overload

import torch

from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.non_blocking import start
from rankwise._collectives.placeholders import check_received
from rankwise._collectives.serialization import (
    Header,
    Serialized,
    buffer_devices,
    empty_buffers,
)
from rankwise._collectives.shared_values import Rest, SharedFiles
from rankwise._collectives.values_per_rank import serialize_each
from rankwise._comm.control.call import Move
from rankwise._comm.data.planes import all_of
from rankwise._comm.group_rank import GroupRank
from rankwise._comm.work import Work
from rankwise._memory import require_available

T = TypeVar("T")


class Following(Enum):
    """What follows the headers of a collective, for any of its ranks."""

    NOTHING = b"-"
    BUFFERS = b"+"
    FILES = b"f"

    @classmethod
    def of(cls, payloads: Sequence[Serialized]) -> Following:
        if any(payload.header.file_bytes for payload in payloads):
            return cls.FILES
        return cls.BUFFERS if any(payload.pieces for payload in payloads) else cls.NOTHING


@overload
def scatter(
    values: Sequence[T] | None,
    *,
    src: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: Literal[False] = ...,
) -> T: ...
@overload
def scatter(
    values: Sequence[T] | None,
    *,
    src: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[T]: ...
@overload
def scatter(
    values: Sequence[T] | None,
    *,
    src: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: bool,
) -> T | Work[T]: ...
def scatter(
    values: Sequence[T] | None,
    *,
    src: int | GroupRank = 0,
    group: GroupLike | None = None,
    async_op: bool = False,
) -> T | Work[T]:
    """Return one of the values of `src` on each rank: the first one on the first rank, and so on.

    Collective over the session, or over `group`. Values are as for `all_gather`.

    Args:
        values: On `src`, one value for each member, in the order of ranks, or a tensor or array with one row for each;
            ignored on the other ranks, where it may be None. But if there are as many there, and they have tensors,
            the number of these and the kinds of containers around them have to be those of the result.
        src: The global rank whose values are sent, or a `GroupRank`.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: `src` is not a member, or the number of values is not the number of members.
        PayloadTypeError: A value cannot be pickled.
        RemoteRankError: One of these errors occurred on `src`.
        MismatchError: Another rank calls another collective, or passes another `src`; or this rank has passed other
            tensors than it received.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> rankwise.scatter(["a", "b"][: rankwise.get_world_size()])  # on 2 ranks: 'a' on rank 0, 'b' on rank 1
        'a'
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, scatter, values, src=src, async_op=async_op)
    with comm.call("scatter") as call, SharedFiles(comm, to_all=False) as files:
        rank = call.rank
        sender = comm.group_rank_of(src, "src")
        call.settings = {"src": comm.ranks[sender]}
        payloads = serialize_each(values, comm.size, "scatter") if rank == sender else []
        require_available(sum(payload.header.file_bytes for payload in payloads))
        # Every rank has to know what follows for any rank, since all agree once more before it moves.
        prefix = Following.of(payloads).value
        message = call.scatter([prefix + payload.header.encode() for payload in payloads], sender)
        following, header = Following(message[:1]), Header.decode(message[1:])
        buffers: dict[str, torch.Tensor] = {}
        rest = Rest.NOTHING if following is Following.NOTHING else Rest.EVERYTHING
        if following is Following.FILES:
            rest = files.deliver(call, payloads, [header], [sender], [buffers])

        def prepare() -> Move:
            if rank != sender:
                received = empty_buffers(rest.of(header), comm)
                buffers.update(received)
                return all_of([comm.planes.transfer([], [(data, sender)]) for data in received.values()])
            remaining = [rest.of(payload) for payload in payloads]
            moves = []
            for device in buffer_devices([payload.header for payload in remaining]):
                outgoing = [
                    (payload.buffers[device], member)
                    for member, payload in enumerate(remaining)
                    if member != rank and device in payload.buffers
                ]
                moves.append(comm.planes.transfer(outgoing, []))
            buffers.update(remaining[rank].copy())
            return all_of(moves)

        if rest is not Rest.NOTHING:
            call.run_prepared(prepare)
    result: T
    [result] = files.values([header], [buffers])
    if rank != sender and isinstance(values, (list, tuple)) and len(values) == comm.size:
        check_received(values[rank], result, call.text)
    return result
