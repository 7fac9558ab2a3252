"""The store of a session: a `TCPStore` that rank zero or the launcher's agent serves; and joining over it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Final, NamedTuple

from torch.distributed import Store, TCPStore

from rankwise._net.acceptor import listen
from rankwise._net.addresses import LOOPBACK, is_loopback
from rankwise._net.connecting import connect_to_any, resolved_text
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise._net.reverse_lookup import warn_if_slow
from rankwise._rendezvous.handshake import REPLY_SECONDS
from rankwise._rendezvous.membership import JoinReply, JoinRequest, conflict, missing, replies_to
from rankwise._rendezvous.signed_store import part_of
from rankwise._rendezvous.store_reads import are_written, get_all, longest_pause
from rankwise.errors import JoinError, JoinTimeoutError, RankwiseError

# The shortest pause between two polls of the store, and the longest one with few ranks.
_PAUSES_SECONDS: Final = (0.001, 0.05)
# How long a process may take to connect to its own store.
_OWN_SECONDS: Final = 10.0
# How many file descriptors a store may open in the process that serves it, clients included.
_STORE_DESCRIPTORS: Final = 12
# How often a process that waits for a store checks whether the wait can still succeed.
_POLL_SECONDS: Final = 0.1
# How long a connection may take before its cause is looked for, and a lookup of a name before it is the cause.
_SLOW_SECONDS: Final = 1.5
# How long the addresses of its host may take to answer, until all are tried again.
_CONNECT_SECONDS: Final = 5.0


class ConnectedStore(NamedTuple):
    """A store of another process.

    Attributes:
        store: The store.
        address: The address of its host that has answered.
        own_address: That of this host on the way there; "" if the store is on this host.
    """

    store: Store
    address: str
    own_address: str


def serve(*, one_host: bool, timeout: float, port: int = 0) -> tuple[Store, int]:
    """Serve a store, and return it with its port: a free one if `port` is 0.

    The socket listens before the store exists, so no other process can take the port.

    Raises:
        OSError: The port is taken, or this process is not allowed to use it.
        JoinError: There are too few file descriptors, or this process cannot connect to its own store.
    """
    listener = listen(port, one_host=one_host)
    _require_descriptors(listener)
    port = listener.getsockname()[1]
    try:
        socket.create_connection((LOOPBACK, port), timeout=_OWN_SECONDS).close()
    except OSError as error:
        listener.close()
        raise JoinError(
            f"this process cannot reach its own port {port} at {LOOPBACK}: {error.strerror or error}; ranks meet "
            "there, so the loopback interface has to be up (ip link set lo up), and nothing may filter it"
        ) from error
    seconds = min(timeout, _OWN_SECONDS)
    store = _constructed(
        lambda: TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        ),
        seconds,
        address=LOOPBACK,
        most=timeout,
    )
    if store is None:
        raise JoinError(
            f"the store that this process serves on port {port} did not answer within {seconds:g} s; are there file "
            "descriptors left (ulimit -n), and threads (ulimit -u)?"
        )
    return store, port


def _require_descriptors(listener: socket.socket) -> None:
    """Check that enough file descriptors are left for a store: without them `TCPStore` terminates the process.

    Raises:
        JoinError: There are too few.
    """
    with ExitStack() as taken:
        try:
            for _ in range(_STORE_DESCRIPTORS):
                taken.callback(os.close, os.dup(listener.fileno()))
        except OSError as error:
            listener.close()
            raise JoinError(
                f"no store can be served for the ranks to meet at: {error.strerror}; it needs {_STORE_DESCRIPTORS} "
                "file descriptors more: raise ulimit -n"
            ) from error


def connect(host: str, port: int, *, timeout: float, lost: Callable[[], str] = str) -> ConnectedStore:
    """Connect to a store, at the address of its host that answers first.

    Args:
        host, port: The address of the store.
        timeout: Seconds to wait.
        lost: Returns why waiting cannot succeed, or ""; called repeatedly during the wait.

    Raises:
        JoinError: No store listens there, or waiting cannot succeed.
        JoinTimeoutError: The store did not answer in time.
    """
    deadline = time.monotonic() + timeout
    while True:  # the agent serves the store before it starts ranks, but a host name may take a while to resolve
        try:
            with connect_to_any(host, port, min(_CONNECT_SECONDS, max(0.1, deadline - time.monotonic()))) as probe:
                address, own = str(probe.getpeername()[0]), str(probe.getsockname()[0])
            break
        except (OSError, UnicodeError) as error:
            if isinstance(error, (ConnectionRefusedError, UnicodeError)) or time.monotonic() > deadline or lost():
                why = lost() or (isinstance(error, OSError) and error.strerror) or error
                raise JoinError(
                    f"no store at {host}:{port} (MASTER_ADDR, MASTER_PORT): {why}{resolved_text(host)}; the launcher "
                    "that set these variables hosts one while it runs, so is it still there?"
                ) from error
            time.sleep(0.1)

    try:
        store = _constructed(
            lambda: TCPStore(address, port, wait_for_workers=False, timeout=timedelta(seconds=timeout)),
            max(0.1, deadline - time.monotonic()),
            lost,
            address=address,
        )
    except JoinError:
        raise
    except Exception as error:
        raise JoinError(f"the store at {host}:{port} refused: {error}") from error
    if store is None:
        raise JoinTimeoutError(
            f"the listener at {host}:{port} (MASTER_ADDR, MASTER_PORT) did not answer as a store within {timeout:g} s: "
            "another program has the port"
        )
    return ConnectedStore(store, address, "" if own == address or is_loopback(own) else own)


def _constructed(
    construct: Callable[[], Store], seconds: float, lost: Callable[[], str] = str, *, address: str, most: float = 0.0
) -> Store | None:
    """Return a store; None if its construction takes longer than so many seconds.

    On a silent port the constructor hangs regardless of its timeout, and cannot be interrupted by a signal. So a thread
    calls it, which is abandoned if it does not return.

    Args:
        construct: Constructs the store.
        seconds: How long that may take.
        lost: Returns why waiting cannot succeed, or "".
        address: The address that the store connects to.
        most: How long it may take, if that is more, while the name of the address is being looked up.

    Raises:
        JoinError: Waiting cannot succeed; the message is the result of `lost`.
    """
    outcome: list[Store | Exception] = []

    def attempt() -> None:
        try:
            outcome.append(construct())
        except Exception as error:  # noqa: BLE001 - raised again below, in the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True, name="rankwise-store")
    thread.start()
    start = time.monotonic()
    is_explained = False
    while thread.is_alive() and (remaining := start + seconds - time.monotonic()) > 0:
        thread.join(min(remaining, _POLL_SECONDS))
        if thread.is_alive() and (why := lost()):
            raise JoinError(why)
        if thread.is_alive() and not is_explained and time.monotonic() - start > _SLOW_SECONDS:
            is_explained = True
            if warn_if_slow(address, min(remaining, _SLOW_SECONDS)):
                seconds = max(seconds, most)
    store = outcome[0] if outcome else None
    if isinstance(store, Exception):
        raise store
    return store


def join_over_store(store: Store, request: JoinRequest, *, timeout: float) -> tuple[JoinReply, Store]:
    """Join over an existing store: send this rank's request, and wait for rank zero's reply.

    The store may be used for several sessions in turn, so each has a key prefix of its own: the number of times that
    the ranks have joined. A rank that fails to join deletes its keys and decrements its number.

    Returns:
        Rank zero's reply, and the store with the prefix of this session.

    Raises:
        JoinError: The store is gone, or other programs write into it.
        JoinTimeoutError: Rank zero did not arrive in time.
    """
    try:
        return _exchange(store, request, timeout=timeout)
    except RuntimeError as error:
        if isinstance(error, RankwiseError):
            raise
        raise JoinError(
            f"the store where the ranks meet failed while rank {request.rank} waited for the others: {error}; is the "
            "launcher that serves it still there?"
        ) from error


def _exchange(store: Store, request: JoinRequest, *, timeout: float) -> tuple[JoinReply, Store]:
    arrivals = f"arrivals/{request.rank}"
    session = part_of(store, str(store.add(arrivals, 1)))
    reply: JoinReply | None = None
    try:
        session.set(f"request/{request.rank}", request.encode())
        if request.rank == 0:
            _reply_to_all(session, request, timeout=timeout)
        key = f"reply/{request.rank}"
        if not wait_for(session, [key], timeout=timeout + REPLY_SECONDS, num_waiting=request.world_size):
            raise JoinTimeoutError(f"rank zero did not arrive within {timeout:g} s, or is stopped; was it started?")
        reply = JoinReply.decode(session.get(key))
    finally:
        if reply is None or reply.error:
            for key in ("request", "reply"):
                session.delete_key(f"{key}/{request.rank}")
            store.add(arrivals, -1)
    return reply, session


def wait_for(store: Store, keys: list[str], *, timeout: float, num_waiting: int = 1) -> bool:
    """Wait until all keys are set; return False if they are not set in time.

    It polls: torch's own wait, in C++, cannot be interrupted by Ctrl-C, and prints its timeouts to stderr.

    Args:
        store: The store.
        keys: The keys.
        timeout: Seconds to wait.
        num_waiting: How many ranks wait like this at the same time.
    """
    start = time.monotonic()
    shortest, longest = _PAUSES_SECONDS
    longest = longest_pause(longest, num_waiting)
    missing = list(keys)
    while not are_written(store, missing) or not are_written(store, missing := list(keys)):  # some may be deleted again
        waited = elapsed_since(start)
        if waited > timeout:
            return False
        time.sleep(min(max(shortest, waited / 10), longest))  # polling adds at most a tenth to the wait
    return True


def _reply_to_all(store: Store, own: JoinRequest, *, timeout: float) -> None:
    """Wait for the requests of all ranks, and reply to those that arrived, as rank zero."""
    ranks = range(own.world_size)
    complete = wait_for(store, [f"request/{rank}" for rank in ranks], timeout=timeout)
    arrived = [rank for rank in ranks if complete or store.check([f"request/{rank}"])]
    requests, problem = _read_requests(store, own, arrived)
    if problem:
        replies = dict.fromkeys(arrived, JoinReply(error=problem))
    elif not complete:
        replies = dict.fromkeys(arrived, JoinReply(error=missing(requests, own.world_size, timeout=timeout), late=True))
    else:
        reached = next((request.reached for request in requests.values() if request.reached), "")
        replies = replies_to(requests, host_address=reached)
    for rank, reply in replies.items():
        store.set(f"reply/{rank}", reply.encode())


def _read_requests(store: Store, own: JoinRequest, arrived: list[int]) -> tuple[dict[int, JoinRequest], str]:
    """Return the requests of these ranks, and why the ranks do not form one world, or ""."""
    requests: dict[int, JoinRequest] = {}
    lines = get_all(store, [f"request/{rank}" for rank in arrived])
    for rank, line in zip(arrived, lines, strict=True):
        try:
            request = JoinRequest.decode(line)
            if request.rank != rank:
                raise ValueError(f"it is the request of rank {request.rank}")  # noqa: TRY301 - as malformed
        except ValueError as error:
            return requests, (
                f"the request of rank {rank} in the store is malformed: {error}; do all ranks run the same version of "
                "rankwise, and does another program use the store?"
            )
        problem = conflict(own, request) if rank else ""
        if problem:
            return requests, problem
        requests[rank] = request
    return requests, ""
