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
from rankwise._session.session import Session, summary_with_location
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
    # Where no session is open: one that is inferred from the process group that other code opened, or from the
    # launcher's variables. Valid as long as that group is the default one.
    inferred: Session | None = None
    # The group of the inferred session. Its callback resets `inferred` when the group is released.
    inferred_group: weakref.ref[Any] | None = None
    groups: Any = _NoGroups()
    # Of a forked process: the groups that were open when it or one of its ancestors was forked, and who opened them.
    inherited: list[tuple[object, int]] = []  # noqa: RUF012 - the process's


thread_local = Current()


def current_session() -> Session:
    """Return the session in force; where there is none, one that stands for what this process can know of itself.

    Local.
    """
    session = thread_local.session
    if session is None:
        session = Current.inferred
    if session is None or not (session.settled or Current.groups.WORLD is session.group_ref()):
        session = _found()
    return session


def joined_session() -> Session:
    """Return the session to talk in.

    As `current_session`, but what was read is read again: a getter that ran before the program set RANK for itself
    must not make it talk to nobody.

    Raises:
        NotJoinedError: Other code has destroyed the session's process group.
    """
    session = current_session()
    if has_destroyed_group(session):
        session.settled = False
        raise NotJoinedError.destroyed()
    if session is Current.inferred and session.group is None and session.reading != own_environment():
        reset_current()
        session = current_session()
    return session


def opened_session() -> Session | None:
    """Return the session that `init()` opened, if one is in force."""
    return thread_local.session


def is_joined() -> bool:
    """Return whether this process has joined others: a session, or somebody's process group, is open.

    Local.
    """
    session = thread_local.session
    return default_group() is not None or (session is not None and session.group is None)


def has_destroyed_group(session: Session) -> bool:
    """Return whether a session has joined with a process group that other code has destroyed."""
    return session.backend is not None and (session.group is None or session.group is not default_group())


def set_current(session: Session) -> None:
    """Make a session the process's."""
    reset_current()
    Current.session = session


def reset_current() -> None:
    """Forget the session in force and whatever stood in for one."""
    Current.session = Current.inferred = None


@contextmanager
def rank_of_this_thread(session: Session) -> Iterator[Session]:
    """Make a session the calling thread's own, for threads that are ranks."""
    before = thread_local.__dict__.get("session")
    thread_local.session = session
    try:
        yield session
    finally:
        if before is None:
            del thread_local.session
        else:
            thread_local.session = before


def close_current(*, reason: str = "left the session", failed: bool = False) -> None:
    """Close the session in force, if there is one, and forget what was read."""
    session = thread_local.session
    reset_current()
    if session is not None:
        session.close(reason=reason, failed=failed)


def default_group() -> torch.distributed.ProcessGroup | None:
    """Return the default process group, if anybody opened one."""
    group: torch.distributed.ProcessGroup | None = Current.groups.WORLD
    return group


def opening_pid(group: torch.distributed.ProcessGroup) -> int:
    """Return the process that opened a group: this one, or its parent if that was before the fork."""
    return next((parent for inherited, parent in Current.inherited if inherited is group), os.getpid())


def _found() -> Session:
    """Return the session in force where the default process group is not the one that was last seen."""
    group = default_group()
    opened = thread_local.session
    # A session without a group, as tests put in force, has nothing to do with other code's; and one whose group was
    # destroyed tells who this process was until another is opened, which is then the one that counts.
    if opened is not None and (opened.backend is None or group is None or opened.group is group):
        return opened
    session = Current.inferred
    if session is None or session.group is not group:
        session = Current.inferred = _infer(group)
    return session


def _infer(group: torch.distributed.ProcessGroup | None) -> Session:
    if group is None:
        Current.inferred_group = None
        return Session(read_environment())
    from rankwise._session.adoption import adopt  # noqa: PLC0415 - needs torch, which this process has imported

    Current.inferred_group = weakref.ref(group, _reset_inferred)
    return adopt(group, pid=opening_pid(group))


def _reset_inferred(reference: weakref.ref[Any]) -> None:
    if reference is Current.inferred_group:
        Current.inferred = Current.inferred_group = None


def _close_at_exit() -> None:
    # The interpreter keeps the exception that ended the program here.
    error = getattr(sys, "last_value", None)
    if error is None:
        close_current()
    else:
        close_current(reason=f"left with {summary_with_location(error)}", failed=True)


def _begin_anew_in_child() -> None:
    Current.inferred = None
    keep_groups_for_good()
    group = default_group()
    if group is not None and opening_pid(group) == os.getpid():
        Current.inherited.append((group, os.getppid()))


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_begin_anew_in_child)
