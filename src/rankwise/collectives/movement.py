"""Collectives that move values from or to one rank: gather, broadcast, scatter. Values may be anything.

Each starts with a letter, in which a rank that failed says so; what did not fit in there follows as bulk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from rankwise.collectives.groups import comm_of
from rankwise.collectives.payload import Letter, Parcel, bulk_devices, pack, room_for, unpack
from rankwise.comm.comm import Comm
from rankwise.comm.frame import Call
from rankwise.errors import InvalidArgumentError

T = TypeVar("T")


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
        MismatchError: Another rank calls something else.
        CollectiveError: A rank is gone, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.gather(1.5)
        [1.5]
    """
    comm = comm_of(group)
    call = Call("gather", {"dst": dst})
    with comm.taking_part(call) as me:
        receiver = comm.place_of(dst, "dst")
        parcel = pack(value)
        messages = comm.collect(call, parcel.letter.encode(), receiver)
        if messages is None:
            for data in parcel.bulk.values():
                comm.transfer([(data, receiver)], [])
            return None
        letters = [Letter.decode(message) for message in messages]
        bulk = [parcel.copy() if place == me else room_for(letter, comm) for place, letter in enumerate(letters)]
        for device in bulk_devices(letters):
            incoming = [(parts[device], place) for place, parts in enumerate(bulk) if place != me and device in parts]
            comm.transfer([], incoming)
    return [unpack(letter, parts) for letter, parts in zip(letters, bulk, strict=True)]


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
        MismatchError: Another rank calls something else, or has another `src`.
        CollectiveError: A rank is gone, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.broadcast({"seed": 7})
        {'seed': 7}
    """
    comm = comm_of(group)
    call = Call("broadcast", {"src": src})
    with comm.taking_part(call) as me:
        sender = comm.place_of(src, "src")
        parcel = pack(value) if me == sender else None
        letter = Letter.decode(comm.announce(call, b"" if parcel is None else parcel.letter.encode(), sender))
        bulk = room_for(letter, comm) if parcel is None else parcel.copy()
        for data in bulk.values():
            comm.broadcast(data, sender)
    result: T = unpack(letter, bulk)
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
        MismatchError: Another rank calls something else, or has another `src`.
        CollectiveError: A rank is gone, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.scatter(["a"])
        'a'
    """
    comm = comm_of(group)
    call = Call("scatter", {"src": src})
    with comm.taking_part(call) as me:
        sender = comm.place_of(src, "src")
        parcels = _pack_all(values, comm.size) if me == sender else []
        letter = Letter.decode(comm.deliver(call, [parcel.letter.encode() for parcel in parcels], sender))
        bulk = parcels[me].copy() if parcels else room_for(letter, comm)
        if not parcels:
            for data in bulk.values():
                comm.transfer([], [(data, sender)])
        for device in bulk_devices([parcel.letter for parcel in parcels]):
            outgoing = [
                (parcel.bulk[device], place)
                for place, parcel in enumerate(parcels)
                if place != me and device in parcel.bulk
            ]
            comm.transfer(outgoing, [])
    result: T = unpack(letter, bulk)
    return result


def _pack_all(values: Sequence[object] | None, size: int) -> list[Parcel]:
    """Pack one value for each member.

    Raises:
        InvalidArgumentError: There is not one for each.
    """
    if not isinstance(values, (Sequence, torch.Tensor)) or isinstance(values, (str, bytes)) or len(values) != size:
        length = f" of {len(values)}" if isinstance(values, Sequence) else ""
        got = f"a {type(values).__name__}{length}"
        raise InvalidArgumentError(f"scatter takes one value for each of {size} ranks on src, got {got}")
    return [pack(value) for value in values]
