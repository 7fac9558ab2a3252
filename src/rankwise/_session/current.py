"""The session in force: the only mutable global.

It belongs to the process; a thread that is itself a rank has its own. Where there is none, a process group that
somebody else opened is adopted, and where there is none either, the launcher's variables speak.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rankwise._session.environ import own_environment, read_environment
from rankwise._session.session import Session, summary
from rankwise._torch import keep_groups_for_good
from rankwise.errors import NotJoinedError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class _NoGroups:
    """Stands for `torch.distributed.group` until torch is imported."""

    @property
    def WORLD(self) -> object:  # noqa: N802 - torch's name
        # Without `group` while another thread imports it, and for good where torch was built without it.
        group = getattr(sys.modules.get("torch.distributed"), "group", None)
        if group is None:
            return None
        Current.groups = group
        return group.WORLD


class Current(threading.local):
    """The state. Class attributes are the process's; a thread that is a rank overrides `session` for itself."""

    session: Session | None = None
    # What stands in for a session where there is none: the group that somebody else opened, or what the launcher's
    # variables say. Good for as long as that group is the default one.
    stand_in: Session | None = None
    # Forgets the stand-in when its group is gone.
    watch: weakref.ref[Any] | None = None
    groups: Any = _NoGroups()
    # Of a forked process: the groups that were open when it or one of its ancestors was forked, and who opened them.
    inherited: list[tuple[object, int]] = []  # noqa: RUF012 - the process's


in_force = Current()


def session_in_force() -> Session:
    """Return the session in force; where there is none, one that stands for what this process can know of itself.

    Local.
    """
    session = in_force.session
    if session is None:
        session = Current.stand_in
    if session is None or not (session.settled or Current.groups.WORLD is session.group_ref()):
        session = _found()
    return session


def joined_session() -> Session:
    """Return the session to talk in.

    As `session_in_force`, but what was read is read again: a getter that ran before the program set RANK for itself
    must not make it talk to nobody.

    Raises:
        NotJoinedError: Other code has destroyed the session's process group.
    """
    session = session_in_force()
    if has_lost_its_group(session):
        session.settled = False
        raise NotJoinedError.destroyed()
    if session is Current.stand_in and session.group is None and session.reading != own_environment():
        forget()
        session = session_in_force()
    return session


def opened_session() -> Session | None:
    """Return the session that `init()` opened, if one is in force."""
    return in_force.session


def is_joined() -> bool:
    """Return whether this process has joined others: a session, or somebody's process group, is open.

    Local.
    """
    session = in_force.session
    return foreign_group() is not None or (session is not None and session.group is None)


def has_lost_its_group(session: Session) -> bool:
    """Return whether a session has joined with a process group that other code has destroyed."""
    return session.backend is not None and (session.group is None or session.group is not foreign_group())


def put_in_force(session: Session) -> None:
    """Make a session the process's."""
    forget()
    Current.session = session


def forget() -> None:
    """Forget the session in force and whatever stood in for one."""
    Current.session = Current.stand_in = None


@contextmanager
def rank_of_this_thread(session: Session) -> Iterator[Session]:
    """Make a session the calling thread's own, for threads that are ranks."""
    before = in_force.__dict__.get("session")
    in_force.session = session
    try:
        yield session
    finally:
        if before is None:
            del in_force.session
        else:
            in_force.session = before


def close_in_force(*, reason: str = "left the session", failed: bool = False) -> None:
    """Close the session in force, if there is one, and forget what was read."""
    session = in_force.session
    forget()
    if session is not None:
        session.close(reason=reason, failed=failed)


def foreign_group() -> torch.distributed.ProcessGroup | None:
    """Return the default process group, if anybody opened one."""
    group: torch.distributed.ProcessGroup | None = Current.groups.WORLD
    return group


def opener(group: torch.distributed.ProcessGroup) -> int:
    """Return the process that opened a group: this one, or its parent if that was before the fork."""
    return next((parent for inherited, parent in Current.inherited if inherited is group), os.getpid())


def _found() -> Session:
    """Return the session in force where the default process group is not the one that was last seen."""
    group = foreign_group()
    opened = in_force.session
    # A session without a group, as tests put in force, has nothing to do with other code's; and one whose group was
    # destroyed tells who this process was until another is opened, which is then the one that counts.
    if opened is not None and (opened.backend is None or group is None or opened.group is group):
        return opened
    session = Current.stand_in
    if session is None or session.group is not group:
        session = Current.stand_in = _stand_in(group)
    return session


def _stand_in(group: torch.distributed.ProcessGroup | None) -> Session:
    if group is None:
        Current.watch = None
        return Session(read_environment())
    from rankwise._session.adoption import adopt  # noqa: PLC0415 - needs torch, which this process has imported

    Current.watch = weakref.ref(group, _forget_stand_in)
    return adopt(group, pid=opener(group))


def _forget_stand_in(watch: weakref.ref[Any]) -> None:
    if watch is Current.watch:
        Current.stand_in = Current.watch = None


def _close_at_exit() -> None:
    # The interpreter keeps the exception that ended the program here.
    error = getattr(sys, "last_value", None)
    if error is None:
        close_in_force()
    else:
        close_in_force(reason=f"left with {summary(error)}", failed=True)


def _begin_anew_in_child() -> None:
    Current.stand_in = None
    keep_groups_for_good()
    group = foreign_group()
    if group is not None and opener(group) == os.getpid():
        Current.inherited.append((group, os.getppid()))


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_begin_anew_in_child)
