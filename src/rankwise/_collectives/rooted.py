"""Collectives that move values from or to one rank: gather, broadcast, scatter. Values may be anything.

Each starts with a letter, in which a rank that failed says so; what did not fit in there follows as bulk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from rankwise._collectives.groups import comm_of
from rankwise._collectives.numpy_arrays import is_array
from rankwise._collectives.serialization import Header, Serialized, bulk_devices, pack, room_for, unpack
from rankwise._comm.control.agreement import Prepared
from rankwise._comm.control.protocol import Call
from rankwise._comm.group import Comm
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
    call = Call("gather")
    with comm.collective(call) as me:
        receiver = comm.group_rank_of(dst, "dst")
        call.settings = {"dst": comm.ranks[receiver]}
        parcel = pack(value)
        said = comm.gather_bytes(call, parcel.letter.encode(), receiver, note=b"bulk" if parcel.bulk else b"")
    letters = [Header.decode(message) for message in said or ()] if me == receiver else []
    bulk: list[dict[str, torch.Tensor]] = [{} for _ in letters]
    if not comm.uses_mesh or any(letter.sizes for letter in letters) or (me != receiver and any(said or ())):
        comm.run_prepared(call, lambda: _gather_bulk(comm, receiver, parcel, letters, bulk))
    return [unpack(letter, parts) for letter, parts in zip(letters, bulk, strict=True)] if me == receiver else None


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
    call = Call("broadcast")
    with comm.collective(call) as me:
        sender = comm.group_rank_of(src, "src")
        call.settings = {"src": comm.ranks[sender]}
        parcel = pack(value) if me == sender else None
        letter = Header.decode(comm.broadcast_bytes(call, b"" if parcel is None else parcel.letter.encode(), sender))

    def prepare() -> Prepared[dict[str, torch.Tensor]]:
        bulk = room_for(letter, comm) if parcel is None else parcel.copy()
        return _all_of([comm.broadcast(data, sender) for data in bulk.values()], bulk)

    result: T = unpack(letter, comm.run_prepared(call, prepare) if letter.sizes else {})
    return result


def scatter(values: Sequence[T] | None, *, src: int = 0, group: Comm | None = None) -> T:
    """Return on each rank the one of `src`'s values that is meant for it.

    Collective over the session, or over `group`. Values are what `all_gather` takes; on other ranks than `src` they
    are not looked at, and may be None.

    Args:
        values: On `src`, one value for each member, in the order of ranks; also a tensor or array of that many rows.
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
    call = Call("scatter")
    with comm.collective(call) as me:
        sender = comm.group_rank_of(src, "src")
        call.settings = {"src": comm.ranks[sender]}
        parcels = _pack_all(values, comm.size) if me == sender else []
        # Every message begins with whether anything follows on any rank, for that is what all have to know.
        follows = b"+" if any(parcel.bulk for parcel in parcels) else b"-"
        said = comm.scatter_bytes(call, [follows + parcel.letter.encode() for parcel in parcels], sender)
    letter = Header.decode(said[1:])

    def prepare() -> Prepared[dict[str, torch.Tensor]]:
        if me != sender:
            bulk = room_for(letter, comm)
            return _all_of([comm.transfer([], [(data, sender)]) for data in bulk.values()], bulk)
        moves = []
        for device in bulk_devices([parcel.letter for parcel in parcels]):
            outgoing = [(parcel.bulk[device], place) for place, parcel in enumerate(parcels) if device in parcel.bulk]
            moves.append(comm.transfer([(data, place) for data, place in outgoing if place != me], []))
        return _all_of(moves, parcels[me].copy())

    result: T = unpack(letter, comm.run_prepared(call, prepare) if said[:1] == b"+" else {})
    return result


def _gather_bulk(
    comm: Comm, dst: int, parcel: Serialized, letters: Sequence[Header], bulk: Sequence[dict[str, torch.Tensor]]
) -> Prepared[None]:
    """Prepare to gather bulk at place `dst`, which alone has letters."""
    if comm.rank != dst:
        return _all_of([comm.transfer([(data, dst)], []) for data in parcel.bulk.values()], None)
    for place, (letter, parts) in enumerate(zip(letters, bulk, strict=True)):
        parts.update(parcel.copy() if place == dst else room_for(letter, comm))
    moves = []
    for device in bulk_devices(letters):
        incoming = [(parts[device], place) for place, parts in enumerate(bulk) if place != dst and device in parts]
        moves.append(comm.transfer([], incoming))
    return _all_of(moves, None)


def _all_of(moves: Sequence[Prepared[None]], result: T) -> Prepared[T]:
    """Return one move of several, which returns the result."""

    def run() -> T:
        for move in moves:
            move()
        return result

    return run


def _pack_all(values: Sequence[object] | None, size: int) -> list[Serialized]:
    """Pack one value for each member.

    Raises:
        InvalidArgumentError: There is not one for each.
    """
    each = _listed(values)
    if each is None or len(each) != size:
        got = f"a {type(values).__qualname__}{'' if each is None else f' of {len(each)}'}"
        raise InvalidArgumentError(f"scatter takes one value for each of {size} ranks on src, got {got}")
    return [pack(value) for value in each]


def _listed(values: object) -> list[object] | None:
    """Return the values of a sequence, or the rows of a tensor or array; None for anything else."""
    if isinstance(values, Sequence):
        return None if isinstance(values, (str, bytes)) else list(values)
    if not isinstance(values, torch.Tensor) and not is_array(values):
        return None
    try:
        return list(values)  # type: ignore[call-overload, no-any-return]  # arrays have rows
    except (TypeError, ValueError, RuntimeError):  # as of one without dimensions, or without contents
        return None
