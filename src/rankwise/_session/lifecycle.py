"""How a session is opened, with its process group, and how what it has opened is closed."""

from __future__ import annotations

import importlib
import logging
import socket
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, cast

import torch
import torch.distributed as dist

from rankwise._comm.comm import Comm, open_comm
from rankwise._comm.control.links.connect import HostConnections
from rankwise._comm.control.registry import GroupRegistry
from rankwise._comm.gloo_threads import await_idle_threads
from rankwise._dependencies import has_posix, missing_posix
from rankwise._environment.facts import LaunchEnvironment
from rankwise._net.addresses import LOOPBACK
from rankwise._net.host import launching_process
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise._net.polling import wait_readable
from rankwise._rendezvous.endpoint import Endpoint, authenticated, choose
from rankwise._rendezvous.membership import JoinReply
from rankwise._rendezvous.mpi import endpoint_over_mpi, needs_mpi
from rankwise._rendezvous.signed_store import SignedStore, part_of
from rankwise._session.device import bind, choose_backend, serves
from rankwise._session.environ import read_secret, with_first_host
from rankwise._session.joining import Joined, join_with_device, own_address, select_device
from rankwise._session.loss_watch import LossWatch
from rankwise._session.progress_report import report_session_timeout
from rankwise._session.session import SessionState
from rankwise._text import ranks_text
from rankwise._torch import keep_gloo_on, listening_on
from rankwise.errors import JoinError

log = logging.getLogger(__name__)

# How long rank zero waits for the other ranks before it logs a warning.
_PATIENCE_SECONDS = 5.0
# How long rank zero serves the store after an error: the others may still read the reason from it, as in an exclusive
# section that has failed.
_FAILED_SECONDS: Final = 5.0


@dataclass(slots=True)
class OpenedResources:
    """The resources that a session has opened, and closes."""

    comm: Comm
    group: weakref.ref[dist.ProcessGroup]
    joined: Joined
    hooks: tuple[Callable[..., object], Callable[..., object]]
    timeout: float
    reset: Callable[[], None]
    unset_interface: Callable[[], None]
    watch: LossWatch | None

    def close(self, reason: str, failed: bool) -> None:
        """Close all of them, and wait for the other ranks on rank zero, whose store they may still need."""
        self.reset()
        self.unset_interface()
        # First: ranks that have closed already may be joining the next world, perhaps on the same port.
        self.joined.release_port()
        still_ours = dist.is_initialized() and dist.group.WORLD is self.group()
        if self.watch is not None:
            self.watch.close()
            if failed and still_ours:  # to destroy the group would wait for what the device has queued
                self.watch.abort()
        self.comm.shutdown(reason)
        if still_ours:
            dist.destroy_process_group()
        await_idle_threads()
        before, theirs = self.hooks
        if sys.excepthook is theirs:
            sys.excepthook = before
        if self.joined.reading.rank.value == 0:
            _serve_until_others_leave(self.joined.connections, timeout=_FAILED_SECONDS if failed else self.timeout)
        self.joined.close()


def _serve_until_others_leave(connections: dict[int, socket.socket], *, timeout: float) -> None:
    """Wait until every other rank has closed its connection: a rank that has not may still need the store."""
    start = time.monotonic()
    warned = False
    connected = dict(connections)
    while connected and elapsed_since(start) < timeout:
        for rank in wait_readable(connected, _PATIENCE_SECONDS / 10):
            del connected[rank]
        if not warned and connected and time.monotonic() - start > _PATIENCE_SECONDS:
            warned = True
            log.warning("rank 0 waits up to %g s until %s leave(s)", timeout, ranks_text(sorted(connected)))


def preload_torch_functional() -> None:
    """Import the torch module whose functions have the default group as a default argument, before there is a group.

    If it is first imported while a group is open, as by building an optimizer, it keeps that group alive forever. For
    that reason nothing imports it when a group is adopted. See docs/decisions/0006-letting-go-of-a-group.md.
    """
    importlib.import_module("torch.distributed.nn.functional")


def open_session(
    reading: LaunchEnvironment,
    *,
    backend: str | None,
    device: str | torch.device | None,
    joining: float,
    timeout: float,
    check: bool,
    shares_tensors: bool,
    reset: Callable[[], None],
    on_hosts: Callable[[HostConnections], None] | None = None,
) -> SessionState:
    """Open the session of a process that has neither a session nor a process group; closing it calls `reset` first.

    Joining may take `joining` seconds, and a collective `timeout`. `on_hosts` takes the connections for the processes
    that watch the hosts, if there are several hosts.

    Raises:
        JoinError: The ranks could not meet, or do not form one world.
        InvalidArgumentError: There is no such backend or device.
        MissingDependencyError: There are several ranks, and this is Windows.
    """
    reading = with_first_host(reading)
    if needs_mpi(reading):
        endpoint: Endpoint | None = endpoint_over_mpi(reading, timeout=joining)
    else:
        endpoint = choose(reading, launching_process=launching_process)
    if endpoint is None:
        joined = Joined(JoinReply().complete(reading, "a world of one"), dist.HashStore(), {})
    elif not has_posix():
        raise missing_posix("a world of several ranks")
    else:
        secret = read_secret(one_host=endpoint.one_host or reading.is_one_host)
        joined = join_with_device(
            reading, authenticated(endpoint, secret), backend, device, timeout=joining, check=check, secret=secret
        )
    report_session_timeout(joining)  # a host that is lost is noticed as early as one that does not join
    own = select_device(joined, backend, device, timeout=joining)
    registry = _new_registry(joined, own, timeout=timeout, check=check, endpoint=endpoint)
    registry.shares_tensors = shares_tensors
    registry.on_hosts = on_hosts
    return _open_group(joined, registry, choose_backend(backend, own), reset)


def _new_registry(
    joined: Joined, device: torch.device, *, timeout: float, check: bool, endpoint: Endpoint | None
) -> GroupRegistry:
    store = part_of(joined.store, "rankwise")
    # The launcher's own numbers come first: those from the handshake depend on what other processes have sent.
    one_host = (endpoint is not None and endpoint.one_host) or joined.reading.known_topology()["num_nodes"].value == 1
    return GroupRegistry(
        rank=joined.reading.rank.value,
        ranks=range(joined.reading.world_size.value),
        device=device,
        timeout=timeout,
        check=check,
        one_host=one_host,
        store=lambda: store,
        own_address=lambda: LOOPBACK if endpoint is None else own_address(joined, endpoint),
        find_dead_ranks=joined.monitor.lost,
        secret=joined.secret,
    )


def _open_group(joined: Joined, registry: GroupRegistry, backend: str, reset: Callable[[], None]) -> SessionState:
    preload_torch_functional()
    excepthook = sys.excepthook
    rank, world_size = joined.reading.rank.value, joined.reading.world_size.value
    joined.group_store = _store_of_group(joined.store, backend)
    unset_interface = keep_gloo_on("" if registry.one_host else registry.gloo_interface)

    has_device_backend = serves(backend, registry.device)

    def init_process_group() -> None:
        bind(registry.device)  # of the current thread
        dist.init_process_group(
            backend,
            store=joined.group_store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=registry.timeout),
            # Bound early to its device, NCCL connects now and not in the first collective.
            device_id=registry.device if has_device_backend else None,
        )

    try:
        with listening_on(registry.gloo_interface):
            joined.monitor.run(init_process_group)
        if world_size > 1:
            registry.connect()
        comm = open_comm(dist.group.WORLD, ranks=range(world_size), registry=registry)
    except Exception as error:
        sys.excepthook = excepthook
        unset_interface()
        registry.close("could not join")
        if dist.is_initialized():
            dist.destroy_process_group()
        lost = joined.monitor.lost(range(world_size))
        why = f"{lost}. {error}" if lost and lost not in str(error) else str(error)
        text = f"rank {rank} of {world_size} met the others, but backend {backend!r} did not start: {why}"
        if rank == 0:
            joined.monitor.send(text)
        joined.close()
        raise JoinError(text) from error
    group = cast("dist.ProcessGroup", dist.group.WORLD)
    resources = OpenedResources(
        comm=comm,
        group=weakref.ref(group),
        joined=joined,
        hooks=(excepthook, sys.excepthook),
        timeout=registry.timeout,
        reset=reset,
        unset_interface=unset_interface,
        watch=LossWatch(comm) if world_size > 1 and has_device_backend else None,
    )
    return SessionState(
        joined.reading,
        comm=comm,
        device=registry.device,
        group=group,
        backend=backend,
        close=resources.close,
        settled=True,
        timeout=registry.timeout,
    )


def _store_of_group(store: dist.Store, backend: str) -> dist.Store:
    """Return the store where the backends of the default group find each other.

    gloo's addresses are signed, if there is a secret. NCCL copies its store (`clone`), and asks it from threads of its
    own while the interpreter ends: it needs a store that is not written in Python.
    """
    if isinstance(store, SignedStore) and set(backend.replace(":", ",").split(",")) - {"cpu", "gloo"}:
        store = store.unsigned
    return part_of(store, "group")
