"""Values sent from one rank to another: send and recv, checked between the two."""

from __future__ import annotations

from typing import Any, Final

from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.serialization import Header, deserialize, empty_buffers, serialize
from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.control.transports import Prepared
from rankwise._comm.group_rank import GroupRank

_OPERATION: Final = "send/recv"


def send(value: Any, dst: int | GroupRank, *, group: GroupLike | None = None) -> None:  # noqa: ANN401 - any value
    """Send a value to another rank, which calls `recv`.

    Collective over the two ranks: returns when the other rank has received the value. Values are as for `all_gather`.
    Values between two ranks are received in the order in which they were sent. If every rank sends before it receives,
    as in a ring, they wait for each other: let one of them receive first.

    Args:
        value: The value.
        dst: The rank that receives it: a global rank, or a `GroupRank`.
        group: The group that both ranks are members of: a `Group`, or a mesh or process group of torch; all ranks by
            default.

    Raises:
        InvalidArgumentError: `dst` is not a member, or is this rank.
        PayloadTypeError: The value cannot be pickled.
        RemoteRankError: The other rank failed.
        MismatchError: The other rank sends too, or both wait for each other in different collectives.
        CollectiveError: The other rank is dead, or did not call within the session's timeout; or no collective of all
            ranks has connected the ranks yet, in a session over a process group of other code.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> if rankwise.get_world_size() == 2:
        ...     if rankwise.get_rank() == 0:
        ...         rankwise.send({"step": 7}, dst=1)
        ...     else:
        ...         rankwise.recv(src=0)  # {'step': 7}
    """
    comm = comm_of(group)
    other = comm.group_rank_of(dst, "dst")
    _move(comm.pair(other), _call(comm, comm.require_member(), other), value, is_sender=True)


def recv(src: int | GroupRank, *, group: GroupLike | None = None) -> Any:  # noqa: ANN401 - any value
    """Return the value that another rank sends to this one by `send`.

    Collective over the two ranks.

    Args:
        src: The rank that sends it: a global rank, or a `GroupRank`.
        group: The group that both ranks are members of: a `Group`, or a mesh or process group of torch; all ranks by
            default.

    Raises:
        InvalidArgumentError: `src` is not a member, or is this rank.
        RemoteRankError: The other rank failed, as with a value that cannot be pickled.
        MismatchError: The other rank receives too, or both wait for each other in different collectives.
        CollectiveError: The other rank is dead, or did not call within the session's timeout; or no collective of all
            ranks has connected the ranks yet, in a session over a process group of other code.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> if rankwise.get_world_size() == 2:
        ...     if rankwise.get_rank() == 0:
        ...         rankwise.send({"step": 7}, dst=1)
        ...     else:
        ...         rankwise.recv(src=0)  # {'step': 7}
    """
    comm = comm_of(group)
    other = comm.group_rank_of(src, "src")
    return _move(comm.pair(other), _call(comm, other, comm.require_member()), None, is_sender=False)


def _call(comm: Comm, src: int, dst: int) -> Call:
    return Call(_OPERATION, {"src": comm.ranks[src], "dst": comm.ranks[dst]})


def _move(pair: Comm, call: Call, value: object, *, is_sender: bool) -> Any:  # noqa: ANN401 - any value
    """Send a value, or return the one that is received."""
    with pair.collective(call) as rank:
        sender = rank if is_sender else 1 - rank
        payload = serialize(value) if is_sender else None
        message = b"" if payload is None else payload.header.encode()
        header = Header.decode(pair.broadcast_bytes(call, message, sender))
    buffers = {} if payload is None else payload.buffers

    def prepare() -> Prepared[None]:
        if payload is None:
            buffers.update(empty_buffers(header, pair))
        moves = [
            pair.transfer([(data, 1 - sender)], []) if is_sender else pair.transfer([], [(data, sender)])
            for data in buffers.values()
        ]

        def run() -> None:
            for move in moves:
                move()

        return run

    if header.sizes:
        pair.run_prepared(call, prepare)
    return None if is_sender else deserialize(header, buffers)
