"""Values sent from one rank to another: send and recv, checked between the two.

The calls from one rank to another have an order of their own. Those in the other direction, those of other ranks and
the collectives of the group do not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn, overload

import torch

from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.non_blocking import start_call
from rankwise._collectives.serialization import Header, Serialized, deserialize, empty_buffers, serialize
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call, Move
from rankwise._comm.data.planes import all_of
from rankwise._comm.group_rank import GroupRank
from rankwise._comm.work import Work
from rankwise._xla_use import is_used
from rankwise.errors import PayloadTypeError

# The group ranks in the group of a sender and a receiver.
_SENDER: Final = 0
_RECEIVER: Final = 1


@overload
def send(
    value: object, dst: int | GroupRank, *, group: GroupLike | None = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def send(
    value: object, dst: int | GroupRank, *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[None]: ...
@overload
def send(
    value: object, dst: int | GroupRank, *, group: GroupLike | None = ..., async_op: bool
) -> Work[None] | None: ...
def send(
    value: object, dst: int | GroupRank, *, group: GroupLike | None = None, async_op: bool = False
) -> Work[None] | None:
    """Send a value to another rank, which calls `recv`.

    Collective over the two ranks: ends when the other rank has received the value. Values are as for `all_gather`.
    Values from one rank to another are received in the order in which they were sent; nothing else waits for them. If
    every rank sends before it receives, as in a ring, they wait for each other: pass `async_op=True`.

    Args:
        value: The value.
        dst: The rank that receives it: a global rank, or a `GroupRank`.
        group: The group that both ranks are members of: a `Group`, or a mesh or process group of torch; all ranks by
            default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns when the value was received.

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
    pair = comm.pair(comm.control.require_member(), comm.group_rank_of(dst, "dst"))
    if async_op is not False:
        payload = _payload_on_xla(value) if is_used() else lambda: serialize(value)
        return start_call(pair, "send", lambda: _send(pair, payload), async_op=async_op)
    _send(pair, lambda: serialize(value))
    return None


@overload
def recv(src: int | GroupRank, *, group: GroupLike | None = ..., async_op: Literal[False] = ...) -> Any: ...  # noqa: ANN401 - any value
@overload
def recv(src: int | GroupRank, *, group: GroupLike | None = ..., async_op: Literal[True]) -> Work[Any]: ...
@overload
def recv(src: int | GroupRank, *, group: GroupLike | None = ..., async_op: bool) -> Any: ...  # noqa: ANN401 - any value
def recv(src: int | GroupRank, *, group: GroupLike | None = None, async_op: bool = False) -> Any:
    """Return the value that another rank sends to this one by `send`.

    Collective over the two ranks. Tensors are new ones, of the shape and dtype that were sent.

    Args:
        src: The rank that sends it: a global rank, or a `GroupRank`.
        group: The group that both ranks are members of: a `Group`, or a mesh or process group of torch; all ranks by
            default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the value.

    Raises:
        InvalidArgumentError: `src` is not a member, or is this rank.
        RemoteRankError: The other rank failed, as with a value that cannot be pickled.
        MismatchError: The other rank receives too, or both wait for each other in different collectives.
        CollectiveError: The other rank is dead, or did not call within the session's timeout; or no collective of all
            ranks has connected the ranks yet, in a session over a process group of other code.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> # A ring of any number of ranks.
        >>> import rankwise
        >>> rank, world_size = rankwise.get_rank(), rankwise.get_world_size()
        >>> if world_size > 1:
        ...     sent = rankwise.send(f"from rank {rank}", dst=(rank + 1) % world_size, async_op=True)
        ...     received = rankwise.recv(src=(rank - 1) % world_size)
        ...     sent.wait()
    """
    comm = comm_of(group)
    pair = comm.pair(comm.group_rank_of(src, "src"), comm.control.require_member())
    if async_op is not False:
        return start_call(pair, "recv", lambda: _recv(pair), async_op=async_op)
    return _recv(pair)


def _call(pair: Comm) -> Call:
    return pair.call(f"send/recv from rank {pair.ranks[_SENDER]} to rank {pair.ranks[_RECEIVER]}")


def _payload_on_xla(value: object) -> Callable[[], Serialized]:
    """Serialize a value in this thread, the only one that may read its tensors; an error is that of the call."""
    try:
        payload = serialize(value)
    except PayloadTypeError as error:
        failure = error

        def fail() -> NoReturn:
            raise failure

        return fail
    return lambda: payload


def _send(pair: Comm, serialized: Callable[[], Serialized]) -> None:
    with _call(pair) as call:
        payload = serialized()
        call.broadcast(payload.header.encode(), _SENDER)
        if payload.header.sizes:
            outgoing = [[(data, _RECEIVER)] for data in payload.buffers.values()]
            call.run_prepared(lambda: all_of([pair.planes.transfer(pieces, []) for pieces in outgoing]))


def _recv(pair: Comm) -> Any:  # noqa: ANN401 - any value
    with _call(pair) as call:
        header = Header.decode(call.broadcast(b"", _SENDER))
        buffers: dict[str, torch.Tensor] = {}

        def prepare() -> Move:
            buffers.update(empty_buffers(header, pair))
            return all_of([pair.planes.transfer([], [(data, _SENDER)]) for data in buffers.values()])

        if header.sizes:
            call.run_prepared(prepare)
    return deserialize(header, buffers)
