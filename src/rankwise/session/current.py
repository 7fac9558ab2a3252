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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rankwise.environment.detect import detect
from rankwise.environment.reading import Reading
from rankwise.errors import LauncherEnvironmentError
from rankwise.session.session import Session, summary

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class _NoGroups:
    """Stands for `torch.distributed.group` until torch is imported."""

    @property
    def WORLD(self) -> object:  # noqa: N802 - torch's name
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return None
        InForce.groups = distributed.group
        return distributed.group.WORLD


class InForce(threading.local):
    """The state. Class attributes are the process's; a thread that is a rank overrides `session` for itself."""

    session: Session | None = None
    # What stands in for a session where there is none: the group that somebody else opened, or what the launcher's
    # variables say. Good for as long as that group is the default one.
    stand_in: Session | None = None
    groups: Any = _NoGroups()
    # Of a forked process: the group that its parent had, and the parent.
    inherited: tuple[object, int] = (None, 0)


in_force = InForce()


def session_in_force() -> Session:
    """Return the session in force; where there is none, one that stands for what this process can know of itself.

    Local.
    """
    session = in_force.session
    if session is None:
        session = InForce.stand_in
        if session is None or InForce.groups.WORLD is not session.group:
            session = _stand_in()
    return session


def joined_session() -> Session:
    """Return the session to talk in.

    As `session_in_force`, but what was read is read again: a getter that ran before the program set RANK for itself
    must not make it talk to nobody.
    """
    session = session_in_force()
    if session is InForce.stand_in and session.group is None and session.reading != detect(os.environ):
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


def put_in_force(session: Session) -> None:
    """Make a session the process's."""
    forget()
    InForce.session = session


def forget() -> None:
    """Forget the session in force and whatever stood in for one."""
    InForce.session = InForce.stand_in = None


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


def read_environment(launcher: str = "auto", environ: Mapping[str, str] | None = None) -> Reading:
    """Read who this process is. The one place where `os.environ` is read.

    Local.
    """
    reading = detect(os.environ if environ is None else environ, launcher)
    for warning in reading.warnings:
        log.warning("%s", warning)
    return reading


def read_check(environ: Mapping[str, str] | None = None) -> bool:
    """Read RANKWISE_CHECK: whether single tensors on accelerators are checked too.

    Local.

    Raises:
        LauncherEnvironmentError: It is neither 0 nor 1.
    """
    value = (os.environ if environ is None else environ).get("RANKWISE_CHECK", "").strip()
    if value not in {"", "0", "1"}:
        raise LauncherEnvironmentError(f"RANKWISE_CHECK={value!r} is neither 0 nor 1")
    return value == "1"


def foreign_group() -> torch.distributed.ProcessGroup | None:
    """Return the default process group, if anybody opened one."""
    group: torch.distributed.ProcessGroup | None = InForce.groups.WORLD
    return group


def opener(group: torch.distributed.ProcessGroup) -> int:
    """Return the process that opened a group: this one, or its parent if that was before the fork."""
    inherited, parent = InForce.inherited
    return parent if group is inherited else os.getpid()


def _stand_in() -> Session:
    group = foreign_group()
    if group is None:
        session = Session(read_environment())
    else:
        from rankwise.session.joining import adopt  # noqa: PLC0415 - needs torch, which this process has imported

        session = adopt(group)
    InForce.stand_in = session
    return session


def _close_at_exit() -> None:
    # The interpreter keeps the exception that ended the program here.
    error = getattr(sys, "last_value", None)
    if error is None:
        close_in_force()
    else:
        close_in_force(reason=f"left with {summary(error)}", failed=True)


def _begin_anew_in_child() -> None:
    InForce.stand_in = None
    if foreign_group() is not InForce.inherited[0]:
        InForce.inherited = (foreign_group(), os.getppid())


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_begin_anew_in_child)
