"""Collectives that move values: all_gather, gather, broadcast, scatter. Values may be anything.

Each starts with one exchange of headers, in which a rank that failed says so; only then does the bulk move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from rankwise.collectives.groups import comm_of
from rankwise.collectives.payload import Header, Payload, agreed, attempt, header_of, pack, room_for, unpack
from rankwise.comm.comm import Comm
from rankwise.errors import InvalidArgumentError, RankwiseError

T = TypeVar("T")

# What a rank has to send in somebody else's broadcast.
_NOTHING = Payload(Header(), torch.empty(0, dtype=torch.uint8))


def all_gather(value: T, *, group: Comm | None = None) -> list[T]:
    """Return every rank's value, in the order of ranks.

    Collective over the session, or over `group`. Values may be tensors, of any types and of different shapes, or
    anything that can be pickled; they need not be alike. Received tensors are new, detached, and on this rank's device
    if they came from the like of it, else on the CPU. Tensors inside of other objects travel pickled.

    Args:
        value: This rank's value.
        group: Those who take part; all, by default.

    Raises:
        PayloadTypeError: The value cannot be pickled.
        RemoteRankError: That happened on another rank.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.all_gather("a")
        ['a']
    """
    comm = comm_of(group)
    me = comm.require_member()
    payload, headers = _exchange(comm, value)
    if isinstance(value, torch.Tensor) and headers[0].dtype is not None and len(set(headers)) == 1:
        gathered: list[T] = comm.all_gather(value)  # type: ignore[assignment]  # T is a tensor type here
        return gathered

    # Exact sizes, one sender after the other: padding to the largest would cost all ranks as much as the largest.
    buffers = [
        payload.buffer.clone() if place == me else room_for(header, comm) for place, header in enumerate(headers)
    ]
    for place, buffer in enumerate(buffers):
        comm.broadcast(buffer, place)
    return [unpack(Payload(header, buffer)) for header, buffer in zip(headers, buffers, strict=True)]


def gather(value: T, *, dst: int = 0, group: Comm | None = None) -> list[T] | None:
    """Return every rank's value on one rank, in the order of ranks, and None on the others.

    Collective over the session, or over `group`. Takes what `all_gather` takes.

    Args:
        value: This rank's value.
        dst: The global rank that gets the list.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: `dst` is not a member.
        PayloadTypeError: The value cannot be pickled.
        RemoteRankError: That happened on another rank.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.gather(1.5)
        [1.5]
    """
    comm = comm_of(group)
    me, receiver = comm.require_member(), comm.place_of(dst, "dst")
    payload, headers = _exchange(comm, value)
    if me != receiver:
        comm.transfer([(payload.buffer, receiver)], [])
        return None
    buffers = [
        payload.buffer.clone() if place == me else room_for(header, comm) for place, header in enumerate(headers)
    ]
    comm.transfer([], [(buffer, place) for place, buffer in enumerate(buffers) if place != me])
    return [unpack(Payload(header, buffer)) for header, buffer in zip(headers, buffers, strict=True)]


def broadcast(value: T, *, src: int = 0, group: Comm | None = None) -> T:
    """Return one rank's value on all ranks.

    Collective over the session, or over `group`. Takes what `all_gather` takes; on other ranks than `src` the value
    is not looked at, and may be None.

    Args:
        value: On `src`, what to send.
        src: The global rank whose value counts.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: `src` is not a member.
        PayloadTypeError: The value cannot be pickled.
        RemoteRankError: That happened on `src`.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.broadcast({"seed": 7})
        {'seed': 7}
    """
    comm = comm_of(group)
    me, sender = comm.require_member(), comm.place_of(src, "src")
    own = attempt(value) if me == sender else None
    header = Header.decode(comm.announce(b"" if own is None else header_of(own).encode(), sender))
    payload = agreed(own or _NOTHING, [header], [src])
    buffer = payload.buffer.clone() if me == sender else room_for(header, comm)
    comm.broadcast(buffer, sender)
    result: T = unpack(Payload(header, buffer))
    return result


def scatter(values: Sequence[T] | None, *, src: int = 0, group: Comm | None = None) -> T:
    """Return on each rank the one of `src`'s values that is meant for it.

    Collective over the session, or over `group`. Values are what `all_gather` takes; on other ranks than `src` they
    are not looked at, and may be None.

    Args:
        values: On `src`, one value for each member, in the order of ranks.
        src: The global rank whose values count.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: `src` is not a member, or there is not one value for each member.
        PayloadTypeError: A value cannot be pickled.
        RemoteRankError: Either happened on `src`.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.scatter(["a"])
        'a'
    """
    comm = comm_of(group)
    me, sender = comm.require_member(), comm.place_of(src, "src")
    own = _attempt_all(values, comm.size) if me == sender else []
    messages = [header_of(payload).encode() for payload in own]
    header = Header.decode(comm.deliver(messages, sender))
    payloads = [agreed(payload, [header], [src]) for payload in own or [_NOTHING]]
    buffer = payloads[me].buffer.clone() if me == sender else room_for(header, comm)
    if me == sender:
        comm.transfer([(payload.buffer, place) for place, payload in enumerate(payloads) if place != me], [])
    else:
        comm.transfer([], [(buffer, sender)])
    result: T = unpack(Payload(header, buffer))
    return result


def _exchange(comm: Comm, value: object) -> tuple[Payload, list[Header]]:
    """Tell all members what this rank will send, and learn the same of them."""
    own = attempt(value)
    headers = [Header.decode(message) for message in comm.exchange(header_of(own).encode())]
    return agreed(own, headers, comm.ranks), headers


def _attempt_all(values: Sequence[object] | None, size: int) -> Sequence[Payload | RankwiseError]:
    """Pack one value for each member; if that fails, the error stands for every one of them."""
    try:
        if not isinstance(values, (Sequence, torch.Tensor)) or isinstance(values, (str, bytes)) or len(values) != size:
            length = f" of {len(values)}" if isinstance(values, Sequence) else ""
            got = f"a {type(values).__name__}{length}"
            raise InvalidArgumentError(f"scatter takes one value for each of {size} ranks on src, got {got}")
        return [pack(value) for value in values]
    except RankwiseError as error:
        return [error] * size
