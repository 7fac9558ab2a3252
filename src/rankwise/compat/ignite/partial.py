"""Groups that their members make by themselves, while the other ranks take no part."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from typing import Final, NoReturn, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from rankwise._torch import gloo_on_loopback, local_group_name
from rankwise.comm.comm import Comm
from rankwise.comm.frame import Call
from rankwise.errors import CollectiveError, CollectiveTimeoutError, MismatchError
from rankwise.session.joining import adopt_part
from rankwise.session.session import Session

_LONGEST_PAUSE: Final = 0.05

# How many groups of the same ranks were made in a process group: the members count alike, for each makes them all.
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


def make_group(session: Session, ranks: tuple[int, ...]) -> Comm:
    """Return a comm between some ranks of a session; this one is among them.

    Collective over these ranks alone.

    Raises:
        MismatchError: One of them waits in a collective over the session instead.
        CollectiveError: One of them is gone.
        CollectiveTimeoutError: They did not all come within the session's timeout.
    """
    group = cast("dist.ProcessGroup", session.group)  # there are several ranks
    made = _made.setdefault(group, Counter())
    members = ", ".join(map(str, ranks))
    name = f"ranks {members}/{made[members]}"
    timeout: timedelta = group.get_group_store().timeout  # type: ignore[attr-defined]  # documented, but not in torch's stubs
    board = session.comm.board()
    if board is not None and len(ranks) > 1:
        board.set(f"{name}/{session.rank}", "here")
        try:
            _await(session.comm, board, ranks, name, timeout.total_seconds())
        except BaseException:
            board.delete_key(f"{name}/{session.rank}")  # else one that comes later would wait for this rank
            raise
    made[members] += 1
    local = session.reading.local_world_size
    one_host = local is not None and local.value == session.world_size
    try:
        with local_group_name(f"rankwise {name}"), gloo_on_loopback() if one_host else nullcontext():
            part = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(f"the group of ranks {members} could not be made: torch says: {error}") from error
    return adopt_part(cast("dist.ProcessGroup", part), session)


def _await(comm: Comm, board: dist.Store, ranks: tuple[int, ...], name: str, timeout: float) -> None:
    """Wait until all members have come to the session's store, or one is known not to come."""

    def absent() -> list[int]:
        return [rank for rank in ranks if not board.check([f"{name}/{rank}"])]

    pause, deadline = 0.001, time.monotonic() + timeout
    while missing := absent():
        elsewhere = {rank for rank in missing if comm.interrupted_by(rank)}
        if elsewhere and (still := sorted(elsewhere.intersection(absent()))):  # else it came between the two looks
            _end_their_wait(comm, ranks, still)
        gone = comm.gone(missing)
        if gone and absent():
            raise CollectiveError(f"the group of ranks {list(ranks)} could not be made: {gone}")
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"the group of ranks {list(ranks)} could not be made within {timeout:g} s: ranks {missing} did not "
                "come; every rank in the list has to pass it"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _end_their_wait(comm: Comm, ranks: tuple[int, ...], elsewhere: list[int]) -> NoReturn:
    """Raise that members wait in another collective; they hear of it."""
    with comm.taking_part(Call(f"a group of ranks {list(ranks)}")):
        raise MismatchError(
            f"group={list(ranks)} is passed here for the first time, but ranks {elsewhere} wait in a collective over "
            "all ranks; every rank in the list has to pass it"
        )
