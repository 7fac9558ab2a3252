"""A session: this process as a member of its world. It closes the resources that it opened, and no others.

Decided here: the state of a session, when it ends, and the handle that users have of it. How it is opened is decided in
`lifecycle`, which session is the current one in `current`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, ClassVar, Final, Self

from rankwise._dependencies import require_torch
from rankwise._environment.facts import TOPOLOGY_FIELDS, LaunchEnvironment
from rankwise._text import LEFT
from rankwise._user_frames import raised_at
from rankwise.errors import CollectiveError, NotJoinedError, RemoteRankError, message_of
from rankwise.topology import Topology

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from rankwise._comm.comm import Comm
    from rankwise._comm.group import Group
    from rankwise._session.adopted_hosts import AdoptedHosts
    from rankwise._session.key_value_store import Store
    from rankwise._trace.lateness import Lateness

# Seconds.
JOIN_SECONDS: Final = 300.0
# How long the thread of a pending collective may take to notice that the connections are closed. It should not run when
# the interpreter ends.
_CLOSED_SECONDS: Final = 2.0
# Two threads that ask for a store get the same one.
_store_creation = threading.Lock()

# Why users may not close the group of all ranks.
OF_ALL_RANKS: Final = "the group of all ranks is closed with its session: rankwise.finalize()"


class SessionState:
    """The state of a session, for this package.

    Attributes:
        rank, world_size: Those of this process.
        backend: The group's backends, as torch writes them, or None.
        reading: The launch environment: every fact, with its source.
        has_group: The session was made with a process group.
        group_ref: Returns the process group, or None if there is none or it was destroyed. Only torch and its users
            hold a reference to a group: see docs/decisions/0006-letting-go-of-a-group.md.
        settled: This session opened the group, and the group exists, so that getters need not check whether it is still
            the default one.
        hosts: Those of all ranks, in a process group that other code opened; None elsewhere.
        adopted: The comms over process groups that other code made between some of the ranks.
        timeout: Seconds that a collective waits for a rank.
        node_groups: The groups that `node_group()` and `one_per_node_group()` have made, by the name of the function.
        joined_comm: The operations of the group of all ranks, checked for a process that was forked as they begin; None
            before the first use of `comm` in a world that was not joined.
        last_closed: The last open session of this process was closed. Ranks of torch_xla are threads, with a session
            each.
    """

    last_closed: ClassVar[bool] = False
    _opened: ClassVar[weakref.WeakSet[SessionState]] = weakref.WeakSet()

    __slots__ = (
        "__weakref__",
        "_close",
        "_device",
        "_pid",
        "_store",
        "_world_group",
        "adopted",
        "backend",
        "group_ref",
        "has_group",
        "hosts",
        "joined_comm",
        "node_groups",
        "rank",
        "reading",
        "settled",
        "timeout",
        "world_size",
    )

    def __init__(
        self,
        reading: LaunchEnvironment,
        *,
        comm: Comm | None = None,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        backend: str | None = None,
        close: Callable[[str, bool], None] | None = None,
        pid: int | None = None,
        settled: bool = False,
        timeout: float = JOIN_SECONDS,
        hosts: AdoptedHosts | None = None,
    ) -> None:
        self.reading = reading
        self.rank = reading.rank.value
        self.world_size = reading.world_size.value
        self.settled = settled
        self.has_group = group is not None
        self.group_ref: Callable[[], dist.ProcessGroup | None] = _no_group
        if group is not None:
            self.group_ref = weakref.ref(group, self._clear_settled)
        self.backend = backend
        self.timeout = timeout
        self.hosts = hosts
        self.node_groups: dict[str, Group] = {}
        self._world_group: Group | None = None
        self.adopted: dict[weakref.ref[dist.ProcessGroup], Comm] = {}
        self.joined_comm = comm if pid is None or pid == os.getpid() else None
        self._device = device
        self._store: Store | None = None
        self._close = close
        self._pid = os.getpid() if pid is None else pid
        if close is not None:
            SessionState.last_closed = False
            SessionState._opened.add(self)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, or None if there is none or it was destroyed."""
        return self.group_ref()

    @property
    def topology(self) -> Topology:
        """As that of `Session`."""
        return Topology.of(self.complete_topology())

    def publish_host(self) -> None:
        """Let the other ranks of a process group that other code opened know the host of this rank; does not wait."""
        if self.hosts is not None and self.is_of_this_process():
            self.hosts.publish()

    def complete_topology(self, *, local_rank: int | None = None) -> LaunchEnvironment:
        """Return the launch environment, with all that this process can know of its topology.

        Local; waits for other ranks only in a process group that other code opened, and if numbers are missing.

        Args:
            local_rank: This process's rank on its node, if the user has said so, and no launcher.

        Raises:
            JoinTimeoutError: Some ranks have not called `init()`.
            StoreError: The store of that group has ended.
        """
        is_complete = len(self.reading.known_topology()) == len(TOPOLOGY_FIELDS)
        # A forked process cannot use the store: its connection is that of the rank.
        if not is_complete and self.hosts is not None and self.hosts.is_published and self.is_of_this_process():
            seconds = min(self.timeout, JOIN_SECONDS)
            self.reading = self.hosts.complete(self.reading, seconds, local_rank=local_rank)
        return self.reading

    @property
    def comm(self) -> Comm:
        """The comm of the whole world.

        Raises:
            NotJoinedError: The world is larger than one and was not joined, or was joined by another process.
        """
        if not self.is_of_this_process():
            raise NotJoinedError.forked(self.rank)
        if self.joined_comm is None:
            self.joined_comm = self._serial_comm()
        return self.joined_comm

    @property
    def world_group(self) -> Group:
        """The group of the whole world, for collectives over this session.

        Raises:
            NotJoinedError: As by `comm`.
        """
        if self._world_group is None:
            comm = self.comm
            from rankwise._comm.group import Group  # noqa: PLC0415 - imports torch

            self._world_group = Group(comm, close_refusal=OF_ALL_RANKS)
        return self._world_group

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        if self._device is None:
            require_torch("a device")
            from rankwise._session.device import inferred_device  # noqa: PLC0415 - imports torch

            self._device = inferred_device(self.reading)
        return self._device

    @property
    def store(self) -> Store:
        """The key-value store that the ranks share, for texts and bytes.

        Raises:
            NotJoinedError: The world is larger than one and was not joined, or was joined by another process.
        """
        comm = self.comm
        with _store_creation:
            if self._store is None:
                from rankwise._session.key_value_store import Store  # noqa: PLC0415 - imports torch

                self._store = Store(comm, timeout=self.timeout)
            return self._store

    def is_of_this_process(self) -> bool:
        """Return whether this process made the session, and not the one that it was forked from."""
        return self._pid == os.getpid()

    def close(self, *, reason: str = LEFT, failed: bool = False) -> None:
        """Close the resources that this session opened, as `Session.close` does."""
        # A forked child that closed its parent's resources would wait for threads that it does not have.
        if not self.is_of_this_process():
            return
        close, self._close = self._close, None
        if close is not None:
            SessionState._opened.discard(self)
            SessionState.last_closed = not any(one.is_of_this_process() for one in SessionState._opened.copy())
            with _later_errors_of_children(is_wanted=not failed):
                self._close_resources(close, reason, failed=failed)

    def _close_resources(self, close: Callable[[str, bool], None], reason: str, *, failed: bool) -> None:
        comm = self.joined_comm
        if comm is not None:
            comm.finish_works(0 if failed else self.timeout)
        self.group_ref, self.settled = _no_group, False
        self.joined_comm = self._store = None
        self.node_groups.clear()
        close(reason, failed)
        self._world_group = None  # not before: groups that other code has stored for this one are closed first
        self.adopted.clear()
        if comm is not None:
            comm.finish_works(_CLOSED_SECONDS)

    def leave(self, error: BaseException | None) -> None:
        """Close the session at the end of its block, which may have raised an error."""
        failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        is_own = failed and not isinstance(error, (CollectiveError, RemoteRankError))
        if is_own and self._close is not None and self.world_size > 1 and self.is_of_this_process():
            # Closing aborts the collectives of the others, and their errors may end this process before Python prints
            # this one, which is the cause. So it is logged first, unless the others have it too. A launcher of ours
            # gets the record in place of a line on standard error; the caller of a function gets the error itself.
            log = logging.getLogger("rankwise.leaving")
            log.error("rank %d of %d leaves with %s", self.rank, self.world_size, summary_with_location(error))
        self.close(reason=f"left with {summary_with_location(error)}" if failed else LEFT, failed=failed)

    def _clear_settled(self, _: weakref.ref[dist.ProcessGroup]) -> None:
        self.settled = False

    def _serial_comm(self) -> Comm:
        """Return the comm of a process that has not joined others."""
        if self.world_size > 1:
            who = f"this is rank {self.reading.rank} of {self.reading.world_size}"
            if SessionState.last_closed:
                raise NotJoinedError(
                    f"{who}, whose session is closed: the call comes after the block of rankwise.init(), or after "
                    "finalize()"
                )
            raise NotJoinedError(
                f"{who}, but it has not joined that world; call rankwise.init() before the first collective"
            )
        require_torch("a collective")
        from rankwise._comm.comm import serial_comm  # noqa: PLC0415 - imports torch

        return serial_comm(self.device)


class Session:
    """This process as a member of its world.

    Made by `rankwise.init()`; a context manager, closed on exit.
    """

    __slots__ = ("__weakref__", "_state")

    def __init__(self, state: SessionState) -> None:
        self._state = state

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.world_size}, {self._state.reading.launcher}"
        return f"<Session {place}, {self.backend or 'not joined'}>"

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._state.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._state.world_size

    @property
    def backend(self) -> str | None:
        """The backends of the process group, as torch writes them, or None."""
        return self._state.backend

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, or None if there is none or it was destroyed."""
        return self._state.group

    @property
    def topology(self) -> Topology:
        """The complete position of this process, with all six numbers.

        Raises:
            NotJoinedError: Some are not known before the world is joined.
        """
        return self._state.topology

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._state.device

    def lateness(self) -> list[Lateness]:
        """Return how late each rank came to the last collectives, by call site; the largest sum first.

        Local. Of each open group of the session, the last 1,024 collectives of rankwise, without `send` and `recv`. Of
        groups whose ranks are on several hosts, only their first rank knows, of all collectives but the last one. See
        docs/diagnosis.md for torch's own, and for traces of whole runs.

        Raises:
            NotJoinedError: The session is closed.

        Example:
            >>> import rankwise
            >>> with rankwise.init() as session:
            ...     session.lateness()  # a rank alone waits for nobody
            []
        """
        from rankwise._trace.lateness import lateness_of  # noqa: PLC0415 - few sessions are asked

        return lateness_of(self._state.comm.arrivals())

    def close(self, *, reason: str = LEFT, failed: bool = False) -> None:
        """Close the resources that this session opened; once, and only in the process that opened it.

        Local, except on rank zero: if it serves the store, it waits until the others no longer need it, at most for the
        session's timeout.

        Args:
            reason: The reason that other ranks report if they still wait for this one.
            failed: The program ends with an error, so rank zero does not wait long for the others.
        """
        self._state.close(reason=reason, failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state.leave(error)


def state_behind(session: Session) -> SessionState:
    """Return the state of a session that a user has."""
    return session._state  # noqa: SLF001 - the reason for this function


@contextmanager
def _later_errors_of_children(*, is_wanted: bool) -> Iterator[None]:
    """Call the handler of SIGCHLD at the end of this block if one has arrived; not at all if it is not wanted.

    torch's handler raises when a data worker was killed, wherever the program is then: the closing of a session would
    be left half done, and the other ranks would hear of a lost connection and not of the cause.
    """
    # Windows has no such signal.
    has_handler = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if has_handler else None
    if not callable(handler):
        yield
        return
    arrived: list[FrameType | None] = []
    signal.signal(signal.SIGCHLD, lambda _, frame: arrived.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
    if arrived and is_wanted:
        handler(signal.SIGCHLD, arrived[-1])


def _no_group() -> None:
    """A substitute for the reference to a group if there is none."""


def summary_with_location(error: BaseException | None) -> str:
    """Return an error with the line of the user's program that raised it: "ValueError: no data (train.py:12)"."""
    location = "" if error is None else raised_at(error)
    suffix = f" ({location})" if location else ""
    message = message_of(error).partition("\n")[0]
    return f"{type(error).__name__}{f': {message}' if message else ''}{suffix}"
