"""How the ranks of a host come to share a page: the first of them makes it, and sends the descriptors to the others.

The descriptors travel over local connections whose other end belongs to the same user. All ranks use the page, or none
does: each reports to the first one whether it could map the memory, and the first one replies to all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rankwise._comm.control.page.futex import has_futex
from rankwise._comm.control.page.host_page import HostPage
from rankwise._comm.control.page.layout import FILE_BYTES, MAX_RANKS
from rankwise.errors import CollectiveError, CollectiveTimeoutError

_CHECK_SECONDS: Final = 0.1
_RETRY_SECONDS: Final = 0.005
# After a rank has closed its connection, wait so long for the report that another one has died, which may be why.
_CAUSE_SECONDS: Final = 1.0
# The descriptors that a rank opens later: an epoll, a pair of sockets, and one to spare.
_NUM_SPARE: Final = 4
# Received descriptors are not inherited by programs that this process starts; defined where descriptors can be sent.
_CLOSED_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
# The answers of a rank: it can use the page, for tensors too or not; or it cannot.
_TENSORS: Final = b"*"
_YES: Final = b"+"
_NO: Final = b"-"
# Linux: process, user and group of the peer.
_CREDENTIALS: Final = struct.Struct("3i")

# Called while waiting for ranks, with a function that returns them; raises if one of them is dead.
CheckAlive = Callable[[Callable[[], Sequence[int]]], None]


def share_page(
    connections: Mapping[int, socket.socket],
    *,
    ranks: Sequence[int],
    rank: int,
    deadline: float,
    check_alive: CheckAlive,
    shares_tensors: bool,
) -> HostPage | None:
    """Return the page of this host; None if not all of its ranks can use one.

    Collective over the ranks of the host. It is for tensors too if no rank refuses that.

    Args:
        connections: On the first rank, a local connection to each other one; on the others, one to the first, by rank.
        ranks: The global ranks of this host, two or more, in ascending order.
        rank: The global rank of this process.
        deadline: When to give up, on the monotonic clock.
        check_alive: Raises if a rank that is waited for is dead.
        shares_tensors: This rank may use the page for tensors too.

    Raises:
        CollectiveError: A rank is gone.
        CollectiveTimeoutError: A rank did not answer in time.
    """
    exchange = _Exchange(connections, ranks, deadline, check_alive)
    own = _TENSORS if shares_tensors and has_futex() else _YES
    if rank != ranks[0]:
        return _receive_page(exchange, ranks, rank, own)
    descriptors = _create(connections, ranks)
    page = _open(descriptors, ranks, rank)
    others = ranks[1:]
    for other in others:
        exchange.send(other, _NO if page is None else _YES, [] if page is None else descriptors)
    answers = {_NO if page is None else own, *(exchange.receive(other) for other in others)}
    outcome = next(answer for answer in (_NO, _YES, _TENSORS) if answer in answers)
    for other in others:
        exchange.send(other, outcome, [])
    return _kept(page, outcome)


def _receive_page(exchange: _Exchange, ranks: Sequence[int], rank: int, own: bytes) -> HostPage | None:
    """Receive the page from the first rank."""
    first = ranks[0]
    descriptors = exchange.receive_descriptors(first, 2 * len(ranks) + 1)
    page = _open(descriptors, ranks, rank)
    exchange.send(first, _NO if page is None else own, [])
    return _kept(page, exchange.receive(first))


def _kept(page: HostPage | None, outcome: bytes) -> HostPage | None:
    """Return the page if all ranks have agreed on it; otherwise close it."""
    if page is not None and outcome == _NO:
        page.close()
        return None
    if page is not None:
        page.shares_tensors = outcome == _TENSORS
    return page


def _open(descriptors: Sequence[int], ranks: Sequence[int], rank: int) -> HostPage | None:
    """Return the page with these descriptors: the memory, and an eventfd and a pidfd for each rank."""
    size = len(ranks)
    try:
        if len(descriptors) != 2 * size + 1:
            raise OSError("the descriptors are incomplete")  # noqa: TRY301 - handled like memory that cannot be mapped
        _require_spare(descriptors[0])
        wakers, processes = descriptors[1 : size + 1], descriptors[size + 1 :]
        return HostPage(ranks=ranks, rank=rank, memory=descriptors[0], wakers=wakers, processes=processes)
    except OSError:
        _close_all(descriptors)
        return None


def _require_spare(descriptor: int) -> None:
    """Check that this process can open some more descriptors.

    Raises:
        OSError: It cannot.
    """
    spare: list[int] = []
    try:
        for _ in range(_NUM_SPARE):
            spare.append(os.dup(descriptor))  # noqa: PERF401 - those before an error are closed
    finally:
        _close_all(spare)


def _create(connections: Mapping[int, socket.socket], ranks: Sequence[int]) -> list[int]:
    """Return the descriptors of a new page; an empty list if this host cannot have one."""
    if not hasattr(os, "eventfd") or not hasattr(os, "pidfd_open") or len(ranks) > MAX_RANKS:
        return []
    import fcntl  # noqa: PLC0415 - not on Windows, which has no eventfd either

    descriptors: list[int] = []
    try:
        descriptors.append(os.memfd_create("rankwise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(descriptors[0], FILE_BYTES)
        # No rank can make the file smaller, which would kill the others when they read it.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptors[0], fcntl.F_ADD_SEALS, seals)
        descriptors += [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in ranks]
        for other in ranks:
            process = _process(connections[other]) if other in connections else os.getpid()
            descriptors.append(os.pidfd_open(process))
    except OSError:  # for example, a container has process ids of its own, or too few descriptors are left
        _close_all(descriptors)
        return []
    return descriptors


def _process(connection: socket.socket) -> int:
    """Return the id of the process at the other end of a local connection."""
    sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(sent)[0])


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


class _Exchange:
    """Messages of one byte over the connections, with descriptors or without."""

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        ranks: Sequence[int],
        deadline: float,
        check_alive: CheckAlive,
    ) -> None:
        self._connections = connections
        self._ranks = ranks
        self._deadline = deadline
        self._check_alive = check_alive

    def send(self, rank: int, message: bytes, descriptors: Sequence[int]) -> None:
        connection = self._connections[rank]
        connection.settimeout(_CHECK_SECONDS)
        while True:
            try:
                socket.send_fds(connection, [message], descriptors)
            except OSError as error:
                # The kernel limits how many descriptors of a user are on the way at a time.
                if error.errno == errno.ETOOMANYREFS and time.monotonic() < self._deadline:
                    time.sleep(_RETRY_SECONDS)
                    continue
            return  # a rank that has ended is noticed when its answer is missing

    def receive(self, rank: int) -> bytes:
        """Return the answer of a rank."""
        return self._receive(rank, 0)[0]

    def receive_descriptors(self, rank: int, count: int) -> list[int]:
        """Return the descriptors of a rank's message."""
        return self._receive(rank, count)[1]

    def _receive(self, rank: int, max_descriptors: int) -> tuple[bytes, list[int]]:
        connection = self._connections[rank]
        connection.settimeout(_CHECK_SECONDS)
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(connection, 1, max_descriptors, _CLOSED_ON_EXEC)
            except TimeoutError:
                self._check_alive(lambda: [rank])
                if time.monotonic() > self._deadline:
                    raise CollectiveTimeoutError(f"rank {rank} did not answer while the ranks connected") from None
            except OSError:
                raise self._gone_error(rank) from None
            else:
                if not message:
                    raise self._gone_error(rank)
                return message, descriptors

    def _gone_error(self, rank: int) -> CollectiveError:
        """Return the error of a connection that was closed; raises instead if the death of a rank is known."""
        start = time.monotonic()
        while time.monotonic() - start < _CAUSE_SECONDS:
            self._check_alive(lambda: self._ranks)
            time.sleep(_RETRY_SECONDS)
        return CollectiveError(f"rank {rank} is gone: its connection closed while the ranks connected")
