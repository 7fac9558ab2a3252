"""Groups that their members create alone: only these ranks call, and they rendezvous in the session's store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Final, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from rankwise._comm.comm import Comm
from rankwise._net.host import loopback_interface
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise._rendezvous.signed_store import part_of
from rankwise._session.adoption import adopt_subgroup
from rankwise._session.session import SessionState
from rankwise._torch import listening_on, local_group_name
from rankwise.errors import CollectiveError, CollectiveTimeoutError, InvalidArgumentError, MismatchError

_MAX_PAUSE_SECONDS: Final = 0.05

# The key of an attempt's outcome. The first member that writes it decides for all; otherwise one member could give up
# while another continues, and waits for it.
_OUTCOME: Final = "outcome"
_COMPLETE: Final = b"complete"
_GIVEN_UP: Final = b"given up"
# Followed by the number of the call over the session that has failed, and by the ranks of these members.
_IN_OTHER_CALL: Final = b"in another call"

# The number of attempts of the same ranks that have ended for this member: of a process group, or of a session without.
_finished_attempts: WeakKeyDictionary[dist.ProcessGroup | Comm, Counter[str]] = WeakKeyDictionary()


def make_group(session: SessionState, ranks: tuple[int, ...]) -> Comm:
    """Return a comm between some ranks of a session, this rank among them.

    Collective over these ranks alone.

    Raises:
        MismatchError: One of them waits in a collective over the session instead.
        CollectiveError: One of them ended.
        CollectiveTimeoutError: One of them did not arrive within the session's timeout.
    """
    finished = _finished_attempts.setdefault(session.group or session.comm, Counter())
    members = ", ".join(map(str, ranks))
    store = session.comm.shared_store()
    if store is not None and len(ranks) > 1:
        seconds = _timeout(session.group).total_seconds() if session.group is not None else session.timeout
        rendezvous = MemberRendezvous(session.comm, session.rank, ranks, seconds)
        while not rendezvous.wait(part_of(store, f"ranks {members}/{finished[members]}")):
            finished[members] += 1
    attempt = f"ranks {members}/{finished[members]}"
    finished[members] += 1
    if not session.has_group and store is not None:
        return session.comm.group_of_members(ranks, _common_number(store, part_of(store, attempt)))
    name = f"rankwise {attempt}"
    with local_group_name(name):
        part = new_process_group(session, ranks, by_members=True)
    return adopt_subgroup(cast("dist.ProcessGroup", part), session)


def _common_number(store: dist.Store, attempt: dist.Store) -> int:
    """Return a number that is the same on all members of an attempt, and that no other group of members has."""
    return int(attempt.compare_set("number", "", str(store.add("groups of members", 1))))


def new_process_group(
    session: SessionState, ranks: Sequence[int], *, by_members: bool = False
) -> dist.ProcessGroup | None:
    """Return a new process group of some ranks of a session, with its timeout; None on the other ranks.

    Collective over the session, or over these ranks alone.

    Raises:
        InvalidArgumentError: The ranks are on XLA devices.
        CollectiveError: One of them ended, or did not arrive within the session's timeout.
    """
    _require_process_group(session)
    timeout = _timeout(cast("dist.ProcessGroup", session.group))
    try:
        with (
            listening_on(loopback_interface() if session.reading.is_one_host else ""),
            _not_split() if by_members else nullcontext() as device,
        ):
            made = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=by_members, device_id=device)
    except (RuntimeError, ValueError) as error:
        members = ", ".join(map(str, ranks))
        raise CollectiveError(f"the group of ranks {members} could not be made: torch reports: {error}") from error
    return made if isinstance(made, dist.ProcessGroup) else None


@contextmanager
def _not_split() -> Iterator[torch.device | None]:
    """Let a new group have a communicator of its own, and yield the device for it.

    Where the default group is bound to a device, torch splits its communicator, in which all ranks take part.
    """
    default = dist.group.WORLD
    device = None if default is None else default.bound_device_id
    if default is None or device is None:
        yield None
        return
    default.bound_device_id = None
    try:
        yield device
    finally:
        default.bound_device_id = device


def _require_process_group(session: SessionState) -> None:
    """Check that groups of a session are process groups of torch.

    Raises:
        InvalidArgumentError: The ranks are on XLA devices, where there are none.
    """
    if not session.has_group:
        raise InvalidArgumentError(
            "a session on XLA devices has no process groups of torch: call rankwise.new_group(ranks) on all ranks"
        )


def _timeout(group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = group.get_group_store().timeout  # type: ignore[attr-defined]  # documented, but not in torch's stubs
    return timeout


class MemberRendezvous:
    """A rendezvous of some ranks of a session, in one or more attempts.

    Args:
        comm: The comm of the session.
        rank: This rank.
        ranks: The members.
        timeout: The time limit of all attempts together, in seconds.
    """

    def __init__(self, comm: Comm, rank: int, ranks: tuple[int, ...], timeout: float) -> None:
        self._comm, self._rank, self._ranks, self._timeout = comm, rank, ranks, timeout
        self._start = time.monotonic()

    def wait(self, store: dist.Store) -> bool:
        """Wait until all members have arrived, and return True; False if one of them gave up this attempt.

        Args:
            store: The store of this attempt.

        Raises:
            MismatchError: A member waits in a collective over the session instead.
            CollectiveError: A member ended.
            CollectiveTimeoutError: A member did not arrive in time.
        """
        if not store.check([_OUTCOME]):  # otherwise the others would count this rank as one of the ended attempt
            store.set(str(self._rank), "here")
        try:
            self._wait_for_members(store)
        except BaseException as error:
            outcome = store.compare_set(_OUTCOME, "", _GIVEN_UP.decode())
            if outcome == _COMPLETE and isinstance(error, CollectiveTimeoutError):
                return True  # the last member arrived just before the deadline, and continues
            raise
        return store.compare_set(_OUTCOME, "", _COMPLETE.decode()) == _COMPLETE

    def _wait_for_members(self, store: dist.Store) -> None:
        """Wait until all members have arrived, or one has written an outcome, or one is known not to arrive."""
        pause, waiting = 0.001, False
        while True:
            dead = self._comm.control.dead_ranks(self._ranks)
            if dead:  # a member that arrived and has ended since cannot create the group either
                raise CollectiveError(f"the group of ranks {list(self._ranks)} could not be made: {dead}")
            outcome = store.get(_OUTCOME) if store.check([_OUTCOME]) else b""
            in_session_call = {rank for rank in self._ranks if self._comm.control.pending_call_from(rank)}
            missing = [rank for rank in self._ranks if not store.check([str(rank)])]
            absent = sorted(in_session_call.intersection(missing))
            if outcome.startswith(_IN_OTHER_CALL):  # found by another member
                number, *others = map(int, outcome.removeprefix(_IN_OTHER_CALL).split())
                # All raise it that waited, or have not made the call that has failed, whose frames may be on the way.
                if waiting or self._comm.control.sequence < number:
                    absent = others
            if absent:
                self._raise_mismatch(absent, store)
            if outcome or not missing:
                return
            if elapsed_since(self._start) > self._timeout:
                raise CollectiveTimeoutError(
                    f"the group of ranks {list(self._ranks)} could not be made within {self._timeout:g} s: ranks "
                    f"{missing} did not come; every rank in the list has to pass it"
                )
            time.sleep(pause)
            pause, waiting = min(2 * pause, _MAX_PAUSE_SECONDS), True

    def _raise_mismatch(self, absent: list[int], store: dist.Store) -> NoReturn:
        """Raise that members wait in another collective, and notify them and the members that wait here."""
        ranks = list(self._ranks)
        number = self._comm.control.sequence + 1
        store.compare_set(_OUTCOME, "", " ".join([_IN_OTHER_CALL.decode(), str(number), *map(str, absent)]))
        with self._comm.call(f"a group of ranks {ranks}"):
            raise MismatchError(
                f"group={ranks} is passed here for the first time, but ranks {absent} wait in a collective over "
                "all ranks; every rank in the list has to pass it"
            )
