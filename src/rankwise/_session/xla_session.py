"""A session on XLA devices. Its ranks are processes or threads; there is no process group of torch.

Threads of one process meet in a store in its memory. Several processes meet in a store that the first of them serves:
see docs/decisions/0030-agreement-between-ranks-on-xla-devices.md.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from rankwise import _torch_xla
from rankwise._comm.comm import Comm, open_comm
from rankwise._comm.control.registry import GroupRegistry
from rankwise._comm.control.turns import rank_threads
from rankwise._environment.facts import LaunchEnvironment
from rankwise._environment.xla_processes import MeetingPlace, meeting_place
from rankwise._net.addresses import LOOPBACK
from rankwise._net.host import address_towards, host_id
from rankwise._rendezvous.membership import JoinRequest
from rankwise._rendezvous.store import connect, join_over_store, serve
from rankwise._session.environ import process_variables
from rankwise._session.session import SessionState
from rankwise._torch_xla import DevicePosition
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import JoinError, JoinTimeoutError, RankwiseError

log = logging.getLogger(__name__)

# The stores where the threads of this process meet, for all of its sessions; None stands for the one in its memory.
_stores: Final[dict[MeetingPlace | None, dist.Store]] = {}
_stores_lock: Final = threading.Lock()
_RETRY_SECONDS: Final = 0.05
# How long the process that serves the store waits for the other ranks after an error.
_FAILED_SECONDS: Final = 5.0


def open_xla_session(
    reading: LaunchEnvironment, *, timeout: float, check: bool, reset: Callable[[], None]
) -> SessionState:
    """Open the session of a rank on an XLA device.

    Collective over the ranks.

    Raises:
        MissingDependencyError: There is no torch_xla.
        JoinError: The ranks could not meet, or torch_xla has other ranks than the variables.
    """
    _torch_xla.require_torch_xla("backend='xla'")
    device: torch.device = _torch_xla.device()
    position = _torch_xla.position()
    _check_position(reading, position)
    one_host = position.world_size == position.local_world_size
    place = None
    if position.num_processes > 1:
        place = meeting_place(process_variables(), one_host=one_host, process_index=position.process_index)
    store = dist.HashStore() if position.world_size == 1 else _meet(reading, place, timeout=timeout, check=check)
    registry = GroupRegistry(
        rank=position.rank,
        ranks=range(position.world_size),
        device=device,
        timeout=timeout,
        check=True,  # a reduction that not all ranks make would end their processes
        one_host=one_host,
        store=lambda: dist.PrefixStore("rankwise", store),
        own_address=lambda: LOOPBACK if place is None else address_towards(place.host, place.port),
        backend=DEVICE_TYPE,
        shares_pages=False,
    )
    comm = _open_comm(registry, position)
    serves = place is not None and place.is_served_here

    def close(reason: str, failed: bool) -> None:
        reset()
        is_short = failed or bool(comm.control.dead_ranks())
        comm.shutdown(reason)
        _leave(store, position.world_size if serves else 0, timeout=_FAILED_SECONDS if is_short else timeout)

    return SessionState(
        reading, comm=comm, device=device, backend=DEVICE_TYPE, close=close, settled=True, timeout=timeout
    )


def _check_position(reading: LaunchEnvironment, position: DevicePosition) -> None:
    expected = (reading.rank.value, reading.world_size.value)
    if expected == (position.rank, position.world_size):
        return
    raise JoinError(
        f"this is rank {reading.rank} of {reading.world_size}, but torch_xla has it as rank {position.rank} of "
        f"{position.world_size}: start ranks on XLA devices with rankwise.launch(fn, backend='xla') or "
        "torch_xla.launch(fn); another launcher does not connect the devices"
    )


def _open_comm(registry: GroupRegistry, position: DevicePosition) -> Comm:
    try:
        if position.world_size > 1:
            rank_threads.add(threading.current_thread())
            registry.connect()
        return open_comm(None, ranks=registry.ranks, registry=registry)
    except RankwiseError as error:
        registry.close("could not join")
        raise JoinError(f"rank {position.rank} of {position.world_size} met the others, but {error}") from error


def _meet(reading: LaunchEnvironment, place: MeetingPlace | None, *, timeout: float, check: bool) -> dist.Store:
    """Meet the other ranks, and return the store of the session.

    Args:
        reading: The launch environment of this rank.
        place: Where the processes meet; None for the threads of one process.
        timeout: Seconds to wait for the other ranks.
        check: The argument of `init()`.
    """
    request = JoinRequest.of(
        reading, host=socket.gethostname(), host_id=host_id(), process=os.getpid(), check=check, problem=""
    )
    joint = dist.PrefixStore("rankwise", _store_of_process(place, timeout=timeout))
    reply, store = join_over_store(joint, request, timeout=timeout)
    reply.complete(reading)  # raises if the ranks do not form one world
    return store


def _store_of_process(place: MeetingPlace | None, *, timeout: float) -> dist.Store:
    """Return the store where ranks meet, the same for all threads of this process, and for all of its sessions.

    Raises:
        JoinError: It cannot be served, or does not answer.
    """
    with _stores_lock:
        if place not in _stores:
            _stores[place] = dist.HashStore() if place is None else _served(place, timeout=timeout)
        return _stores[place]


def _served(place: MeetingPlace, *, timeout: float) -> dist.Store:
    """Return a store that the first process serves: this one or another one."""
    if place.is_served_here:
        try:
            return serve(one_host=place.host == LOOPBACK, timeout=timeout, port=place.port)[0]
        except OSError as error:
            raise JoinError(
                f"the store of the ranks cannot be served on port {place.port}: {error.strerror}; set MASTER_PORT to "
                "a free port, the same for all processes"
            ) from error
    deadline = time.monotonic() + timeout
    while True:  # the first process may come later
        try:
            return connect(place.host, place.port, timeout=timeout).store
        except JoinTimeoutError:
            raise
        except JoinError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def _leave(store: dist.Store, awaited: int, *, timeout: float) -> None:
    """Count this rank as gone, and wait until so many ranks are: those of other processes may need the store here."""
    try:
        left = store.add("left", 1)
        deadline = time.monotonic() + timeout
        while left < awaited and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
            left = store.add("left", 0)
    except RuntimeError as error:
        log.debug("the store of the ranks is gone already: %s", error)
