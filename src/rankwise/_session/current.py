"""The current session: the only mutable global.

It belongs to the process; a thread that is itself a rank has its own. Without an open session, one is inferred: from a
process group that other code opened, or else from the launcher's variables.
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

from rankwise._session.child_processes import received_reading, tell_children
from rankwise._session.environ import own_environment, read_environment
from rankwise._session.session import SessionState, summary_with_location
from rankwise._text import LEFT
from rankwise._torch import keep_groups_for_good
from rankwise._xla_use import is_own_group, is_used
from rankwise.errors import NotJoinedError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class _NoGroups:
    """A substitute for `torch.distributed.group` until torch is imported."""

    @property
    def WORLD(self) -> object:  # noqa: N802 - torch's name
        # There is no `group` while another thread imports the module, nor in a build of torch without distributed.
        group = getattr(sys.modules.get("torch.distributed"), "group", None)
        if group is None:
            return None
        Current.groups = group
        return group.WORLD


class Current(threading.local):
    """The state. Class attributes belong to the process; a thread that is a rank overrides the sessions for itself."""

    session: SessionState | None = None
    # Where no session is open: one that is inferred from the process group that other code opened, or from the
    # launcher's variables. Valid as long as that group is the default one.
    inferred: SessionState | None = None
    # The group of the inferred session. Its callback resets `inferred` when the group is released.
    inferred_group: weakref.ref[Any] | None = None
    groups: Any = _NoGroups()
    # In a forked process: the groups that were open when it or an ancestor was forked, with the ids of the processes
    # that opened them.
    inherited: list[tuple[object, int]] = []  # noqa: RUF012 - the process's


thread_local = Current()
# The sessions of threads, to be closed when the interpreter ends.
_sessions_of_threads: weakref.WeakSet[SessionState] = weakref.WeakSet()


def current_session() -> SessionState:
    """Return the current session; without an open one, a session inferred from the default group or the variables.

    Local.
    """
    session = thread_local.session
    if session is None:
        session = thread_local.inferred
    if session is None or not (session.settled or Current.groups.WORLD is session.group_ref()):
        session = _refreshed()
    return session


def joined_session() -> SessionState:
    """Return the session for a collective.

    Like `current_session`, but reads the variables again: a program may call a getter before it sets RANK itself, and
    its collectives must not run in a world of one then.

    Raises:
        NotJoinedError: Other code has destroyed the session's process group.
    """
    opened = thread_local.session
    if opened is not None and opened.settled and Current.groups.WORLD is opened.group_ref():
        return opened  # the usual case, without the calls below
    session = current_session()
    if has_destroyed_group(session):
        session.settled = False
        raise NotJoinedError.destroyed()
    is_alone = session is thread_local.inferred and session.group is None
    if is_alone and session.reading != received_reading(own_environment()):
        reset_current()
        session = current_session()
    return session


def opened_session() -> SessionState | None:
    """Return the session that `init()` opened, or None."""
    return session_of_this_thread() if is_device_thread() else thread_local.session


def is_joined() -> bool:
    """Return whether this process has joined a world: a session, or a process group of other code, is open.

    Local. A world of one counts too, once `init()` has opened it; a process group of torch_xla alone does not.

    Example:
        >>> import rankwise
        >>> rankwise.is_joined()
        False
        >>> with rankwise.init():
        ...     rankwise.is_joined()
        True
    """
    session = thread_local.session
    return default_group() is not None or (session is not None and session.group is None)


def has_destroyed_group(session: SessionState) -> bool:
    """Return whether other code has destroyed the process group of a session."""
    return session.has_group and (session.group is None or session.group is not default_group())


def set_current(session: SessionState) -> None:
    """Make a session the current one of this process, or of this thread if it is a rank itself."""
    reset_current()
    if is_device_thread():
        thread_local.session = session
        _sessions_of_threads.add(session)
    else:
        Current.session = session


def reset_current() -> None:
    """Reset the current session and the inferred one, without closing them."""
    own = thread_local.__dict__
    if own:
        own.clear()
    else:
        Current.session = Current.inferred = None


def session_of_this_thread() -> SessionState | None:
    """Return the session of the calling thread, if it is a rank itself."""
    return thread_local.__dict__.get("session")


@contextmanager
def rank_of_this_thread(session: SessionState) -> Iterator[SessionState]:
    """Make a session the current one of the calling thread, for threads that are ranks."""
    before = session_of_this_thread()
    thread_local.session = session
    try:
        yield session
    finally:
        if before is None:
            thread_local.__dict__.pop("session", None)
        else:
            thread_local.session = before


def close_current(*, reason: str = LEFT, failed: bool = False) -> None:
    """Close the current session if one is open, and reset the inferred one."""
    session = thread_local.session
    reset_current()
    if session is not None:
        session.close(reason=reason, failed=failed)


def is_device_thread() -> bool:
    """Return whether the calling thread may be a rank itself: ranks of torch_xla are threads of this process."""
    if not is_used():
        return False
    from rankwise import _torch_xla  # noqa: PLC0415 - not needed without such devices

    return _torch_xla.is_device_thread()


def default_group() -> torch.distributed.ProcessGroup | None:
    """Return the default process group, or None; also if it is one of torch_xla, which a session cannot adopt."""
    group: torch.distributed.ProcessGroup | None = Current.groups.WORLD
    return None if is_own_group(group) else group


def opening_pid(group: torch.distributed.ProcessGroup) -> int:
    """Return the id of the process that opened a group: this one, or its parent if it was opened before the fork."""
    return next((parent for inherited, parent in Current.inherited if inherited is group), os.getpid())


def _refreshed() -> SessionState:
    """Return the current session after the default process group may have changed."""
    group = default_group()
    opened = thread_local.session
    # An open session takes precedence if it has no group, as those that tests make current; if its group is still the
    # default one; or if its group was destroyed and no other was opened, so that getters keep their values.
    if opened is not None and (not opened.has_group or group is None or opened.group is group):
        return opened
    session = thread_local.inferred
    if session is None or session.group is not group:
        session = _infer(group)
        if is_device_thread():
            thread_local.inferred = session
        else:
            Current.inferred = session
    return session


def _infer(group: torch.distributed.ProcessGroup | None) -> SessionState:
    if is_device_thread():
        return SessionState(read_environment())
    if group is None:
        Current.inferred_group = None
        session = SessionState(received_reading(read_environment()))
        session.group_ref = _group_of_inferred
        return session
    from rankwise._session.adoption import adopt  # noqa: PLC0415 - needs torch, which this process has imported

    Current.inferred_group = weakref.ref(group, _reset_inferred)
    return adopt(group, pid=opening_pid(group))


def _group_of_inferred() -> Any:  # noqa: ANN401 - None, or what is no group
    """Return None, the group of a process without one; in a thread that is a rank itself, what no group is equal to."""
    return thread_local if is_device_thread() else None


def _reset_inferred(reference: weakref.ref[Any]) -> None:
    if reference is Current.inferred_group:
        Current.inferred = Current.inferred_group = None


def _close_at_interpreter_exit() -> None:
    # The interpreter keeps the exception that ended the program here.
    error = getattr(sys, "last_value", None)
    for session in sorted(_sessions_of_threads, key=lambda session: -session.rank):
        session.close()
    if error is None:
        close_current()
    else:
        close_current(reason=f"left with {summary_with_location(error)}", failed=True)


def _reset_in_forked_child() -> None:
    Current.inferred = None
    keep_groups_for_good()
    group = default_group()
    if group is not None and opening_pid(group) == os.getpid():
        Current.inherited.append((group, os.getppid()))


tell_children(lambda: (current_session().reading, own_environment()))
atexit.register(_close_at_interpreter_exit)
if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(after_in_child=_reset_in_forked_child)
