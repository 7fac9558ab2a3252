"""The store of a session: a `TCPStore` that rank zero serves, or the launcher's agent; and the roll call over it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Final

from torch.distributed import PrefixStore, Store, TCPStore

from rankwise._net.acceptor import listen
from rankwise._net.addresses import LOOPBACK
from rankwise._rendezvous.handshake import ANSWER_SECONDS
from rankwise._rendezvous.membership import JoinReply, JoinRequest, answers, conflict, missing
from rankwise.errors import JoinError, JoinTimeoutError, RankwiseError

# The shortest and the longest pause between two looks at the store.
_PAUSES_SECONDS: Final = (0.001, 0.05)
# How long a process may take to reach what it serves itself.
_OWN_SECONDS: Final = 10.0
# How many file descriptors a store may open in the process that serves it, clients included.
_STORE_DESCRIPTORS: Final = 12
# How often somebody who waits for a store looks whether that is in vain.
_LOOK_SECONDS: Final = 0.1


def serve(*, one_host: bool, timeout: float, port: int = 0) -> tuple[Store, int]:
    """Serve a store, and return it with its port: one that is free, if none is asked for.

    The socket listens before the store exists, so nobody else can take the port.

    Raises:
        OSError: The port that was asked for is taken, or not to be had.
        JoinError: There are too few file descriptors, or the store cannot be reached by this process itself.
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
    )
    if store is None:
        raise JoinError(
            f"the store that this process serves on port {port} did not answer within {seconds:g} s; are there file "
            "descriptors left (ulimit -n), and threads (ulimit -u)?"
        )
    return store, port


def _require_descriptors(listener: socket.socket) -> None:
    """Check that there are file descriptors left for a store: TCPStore ends the process where it gets none.

    Raises:
        JoinError: There are not.
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


def connect(host: str, port: int, *, timeout: float, lost: Callable[[], str] = str) -> Store:
    """Connect to a store.

    Args:
        host, port: Where it is served.
        timeout: Seconds that this may take.
        lost: Returns why it is in vain to wait, or ""; asked while this waits.

    Raises:
        JoinError: Nothing that is a store listens there, or it is in vain to wait.
        JoinTimeoutError: It did not answer in time.
    """
    deadline = time.monotonic() + timeout
    while True:  # the agent serves before it starts ranks, but a name may take a while to resolve
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            break
        except (OSError, UnicodeError) as error:
            if isinstance(error, (ConnectionRefusedError, UnicodeError)) or time.monotonic() > deadline or lost():
                why = lost() or (isinstance(error, OSError) and error.strerror) or error
                raise JoinError(
                    f"no store at {host}:{port} (MASTER_ADDR, MASTER_PORT): {why}; the launcher that set these "
                    "variables hosts one while it runs, so is it still there?"
                ) from error
            time.sleep(0.1)

    try:
        store = _constructed(
            lambda: TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout)),
            max(0.1, deadline - time.monotonic()),
            lost,
        )
    except JoinError:
        raise
    except Exception as error:
        raise JoinError(f"the store at {host}:{port} refused: {error}") from error
    if store is None:
        raise JoinTimeoutError(
            f"what listens at {host}:{port} (MASTER_ADDR, MASTER_PORT) did not answer as a store within {timeout:g} s: "
            "another program has the port"
        )
    return store


def _constructed(construct: Callable[[], Store], seconds: float, lost: Callable[[], str] = str) -> Store | None:
    """Return a store; None if that takes longer than so many seconds.

    On a silent port the constructor hangs whatever its timeout is, and hears no signal: so a thread calls it, and may
    be left behind.

    Raises:
        JoinError: It is in vain to wait, as `lost` tells.
    """
    outcome: list[Store | Exception] = []

    def attempt() -> None:
        try:
            outcome.append(construct())
        except Exception as error:  # noqa: BLE001 - raised again below, in the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True, name="rankwise-store")
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and (remaining := deadline - time.monotonic()) > 0:
        thread.join(min(remaining, _LOOK_SECONDS))
        if thread.is_alive() and (why := lost()):
            raise JoinError(why)
    store = outcome[0] if outcome else None
    if isinstance(store, Exception):
        raise store
    return store


def roll_call(store: Store, hello: JoinRequest, *, timeout: float) -> tuple[JoinReply, Store]:
    """Say hello over a store that is there already, and get rank zero's answer.

    A store outlives its sessions, so each world that is joined over it has a part of its own: the ranks count how often
    they have joined, and take back what they said when they did not.

    Returns:
        Rank zero's answer, and the part of the store for this world.

    Raises:
        JoinError: The store is gone, or others write into it.
        JoinTimeoutError: Rank zero did not arrive in time.
    """
    try:
        return _say_hello(store, hello, timeout=timeout)
    except RuntimeError as error:
        if isinstance(error, RankwiseError):
            raise
        raise JoinError(
            f"the store where the ranks meet failed while rank {hello.rank} waited for the others: {error}; is the "
            "launcher that serves it still there?"
        ) from error


def _say_hello(store: Store, hello: JoinRequest, *, timeout: float) -> tuple[JoinReply, Store]:
    arrivals = f"arrivals/{hello.rank}"
    world = PrefixStore(str(store.add(arrivals, 1)), store)
    answer: JoinReply | None = None
    try:
        world.set(f"hello/{hello.rank}", hello.encode())
        if hello.rank == 0:
            _answer_all(world, hello, timeout=timeout)
        key = f"answer/{hello.rank}"
        if not wait_for(world, [key], timeout=timeout + ANSWER_SECONDS):
            raise JoinTimeoutError(f"rank zero did not arrive within {timeout:g} s, or is stopped; was it started?")
        answer = JoinReply.decode(world.get(key))
    finally:
        if answer is None or answer.error:
            for key in ("hello", "answer"):
                world.delete_key(f"{key}/{hello.rank}")
            store.add(arrivals, -1)
    return answer, world


def wait_for(store: Store, keys: list[str], *, timeout: float) -> bool:
    """Wait until all keys are set; False if they are not in time.

    By asking: a wait in C++ would not hear Ctrl-C, and says on stderr that it timed out.
    """
    start = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - start
        if waited > timeout:
            return False
        shortest, longest = _PAUSES_SECONDS
        time.sleep(min(max(shortest, waited / 10), longest))  # so that looking adds a tenth to the wait at most
    return True


def _answer_all(store: Store, own: JoinRequest, *, timeout: float) -> None:
    ranks = range(own.world_size)
    complete = wait_for(store, [f"hello/{rank}" for rank in ranks], timeout=timeout)
    arrived = [rank for rank in ranks if complete or store.check([f"hello/{rank}"])]
    hellos, problem = _read_hellos(store, own, arrived)
    if problem:
        given = dict.fromkeys(arrived, JoinReply(error=problem))
    elif not complete:
        given = dict.fromkeys(arrived, JoinReply(error=missing(hellos, own.world_size, timeout=timeout), late=True))
    else:
        given = answers(hellos)
    for rank, answer in given.items():
        store.set(f"answer/{rank}", answer.encode())


def _read_hellos(store: Store, own: JoinRequest, arrived: list[int]) -> tuple[dict[int, JoinRequest], str]:
    """Return what these ranks have said, and why they are no ranks of one world, or ""."""
    hellos: dict[int, JoinRequest] = {}
    for rank in arrived:
        try:
            hello = JoinRequest.decode(store.get(f"hello/{rank}"))
            if hello.rank != rank:
                raise ValueError(f"it is that of rank {hello.rank}")  # noqa: TRY301 - as what cannot be read
        except ValueError as error:
            return hellos, (
                f"what rank {rank} said in the store cannot be read: {error}; do all ranks run the same rankwise, and "
                "does another program use the store?"
            )
        problem = conflict(own, hello) if rank else ""
        if problem:
            return hellos, problem
        hellos[rank] = hello
    return hellos, ""
