"""Groups that their members make by themselves, while the other ranks take no part."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from typing import Final, NoReturn, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from rankwise import Comm, Session
from rankwise._comm.control.protocol import Call
from rankwise._session.adoption import adopt_subgroup
from rankwise._torch import gloo_on_loopback, local_group_name
from rankwise.errors import CollectiveError, CollectiveTimeoutError, MismatchError

_LONGEST_PAUSE: Final = 0.05

# The key of how an attempt ended. The first member that writes it decides for all: else one could give up while another
# goes on, and wait for it.
_OUTCOME: Final = "outcome"
_COMPLETE: Final = b"complete"
_GIVEN_UP: Final = b"given up"
_ELSEWHERE: Final = b"elsewhere"  # and which members are

# How many attempts to meet, of the same ranks of a process group, are over for this member.
_finished_attempts: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


def make_group(session: Session, ranks: tuple[int, ...]) -> Comm:
    """Return a comm between some ranks of a session; this one is among them.

    Collective over these ranks alone.

    Raises:
        MismatchError: One of them waits in a collective over the session instead.
        CollectiveError: One of them is gone.
        CollectiveTimeoutError: They did not all come within the session's timeout.
    """
    group = cast("dist.ProcessGroup", session.group)  # there are several ranks
    finished = _finished_attempts.setdefault(group, Counter())
    members = ", ".join(map(str, ranks))
    timeout: timedelta = group.get_group_store().timeout  # type: ignore[attr-defined]  # documented, but not in torch's stubs
    store = session.comm.shared_store()
    if store is not None and len(ranks) > 1:
        rendezvous = MemberRendezvous(session.comm, session.rank, ranks, timeout.total_seconds())
        while not rendezvous.wait(dist.PrefixStore(f"ranks {members}/{finished[members]}", store)):
            finished[members] += 1
    name = f"rankwise ranks {members}/{finished[members]}"
    finished[members] += 1
    try:
        with local_group_name(name), gloo_on_loopback() if session.reading.is_one_host else nullcontext():
            part = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(f"the group of ranks {members} could not be made: torch says: {error}") from error
    return adopt_subgroup(cast("dist.ProcessGroup", part), session)


class MemberRendezvous:
    """Some ranks of a session that wait for each other, in as many attempts as it takes.

    Args:
        comm: All ranks of the session.
        rank: This rank.
        ranks: The members.
        timeout: Seconds to wait for them, over all attempts.
    """

    def __init__(self, comm: Comm, rank: int, ranks: tuple[int, ...], timeout: float) -> None:
        self._comm, self._rank, self._ranks, self._timeout = comm, rank, ranks, timeout
        self._deadline = time.monotonic() + timeout

    def wait(self, store: dist.Store) -> bool:
        """Wait until all members have come, and return True; False if one of them gave up this attempt.

        Args:
            store: Where the members find each other, in this attempt alone.

        Raises:
            MismatchError: A member waits in a collective over the session instead.
            CollectiveError: A member is gone.
            CollectiveTimeoutError: They did not all come in time.
        """
        if not store.check([_OUTCOME]):  # else the others would take this rank for one that came to that attempt
            store.set(str(self._rank), "here")
        try:
            self._await(store)
        except BaseException as error:
            outcome = store.compare_set(_OUTCOME, "", _GIVEN_UP.decode())
            if outcome == _COMPLETE and isinstance(error, CollectiveTimeoutError):
                return True  # the last member came at the last moment, and goes on
            raise
        return store.compare_set(_OUTCOME, "", _COMPLETE.decode()) == _COMPLETE

    def _await(self, store: dist.Store) -> None:
        """Wait until all members have come, or one of them has written an outcome, or one is known not to come."""
        pause, waiting = 0.001, False
        while True:
            gone = self._comm.dead_ranks(self._ranks)
            if gone:  # one that came and is gone since does not make the group either
                raise CollectiveError(f"the group of ranks {list(self._ranks)} could not be made: {gone}")
            outcome = store.get(_OUTCOME) if store.check([_OUTCOME]) else b""
            interrupted = {rank for rank in self._ranks if self._comm.pending_call_from(rank)}
            missing = [rank for rank in self._ranks if not store.check([str(rank)])]
            elsewhere = sorted(interrupted.intersection(missing))
            if waiting and outcome.startswith(_ELSEWHERE):  # found by another member; all that waited raise it
                elsewhere = [int(rank) for rank in outcome.split()[1:]]
            if elsewhere:
                self._end_their_wait(elsewhere, store)
            if outcome or not missing:
                return
            if time.monotonic() > self._deadline:
                raise CollectiveTimeoutError(
                    f"the group of ranks {list(self._ranks)} could not be made within {self._timeout:g} s: ranks "
                    f"{missing} did not come; every rank in the list has to pass it"
                )
            time.sleep(pause)
            pause, waiting = min(2 * pause, _LONGEST_PAUSE), True

    def _end_their_wait(self, elsewhere: list[int], store: dist.Store) -> NoReturn:
        """Raise that members wait in another collective; they hear of it, and so do those that wait here."""
        ranks = list(self._ranks)
        store.compare_set(_OUTCOME, "", " ".join([_ELSEWHERE.decode(), *map(str, elsewhere)]))
        with self._comm.collective(Call(f"a group of ranks {ranks}")):
            raise MismatchError(
                f"group={ranks} is passed here for the first time, but ranks {elsewhere} wait in a collective over "
                "all ranks; every rank in the list has to pass it"
            )
