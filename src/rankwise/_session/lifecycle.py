"""How a session is opened and closed: the ranks join, select their devices, and open the process group."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from rankwise._comm.data.torch_backend import TorchGroupComm
from rankwise._comm.gloo_threads import await_rest
from rankwise._comm.registry import GroupRegistry
from rankwise._environment.facts import Fact, LaunchEnvironment
from rankwise._net.addresses import LOOPBACK
from rankwise._net.host import address_towards, host_id, launching_process
from rankwise._rendezvous import handshake, store
from rankwise._rendezvous.endpoint import Endpoint, choose
from rankwise._rendezvous.membership import JoinReply, JoinRequest
from rankwise._rendezvous.readiness import RankMonitor
from rankwise._session.device import bind, choose_backend, choose_device, is_selectable
from rankwise._session.session import Session
from rankwise._session.shutdown import serve_until_others_leave
from rankwise._torch import gloo_on_loopback
from rankwise.errors import JoinError, RankwiseError

# How long a rank that cannot join waits for the others, to report the reason to them.
_REPORT_SECONDS: Final = 10.0
# How long rank zero serves the store after an error: the others may still read the reason from it, as in an exclusive
# section that has failed.
_FAILED_SECONDS: Final = 5.0


@dataclass(slots=True)
class _Joined:
    """A rank that has joined the others.

    Attributes:
        reading: The launch environment, complete.
        store: The store of the session.
        connections: On rank zero, if it serves the store, the open connection to each other rank; on the others, the
            one to rank zero.
        listener: On rank zero, the socket of the handshake. It stays open until the session is closed: the port may be
            the only difference between two jobs, so the second job must get the error that the port is taken.
    """

    reading: LaunchEnvironment
    store: dist.Store
    connections: dict[int, socket.socket]
    listener: socket.socket | None = None

    @property
    def monitor(self) -> RankMonitor:
        """Monitors the other ranks."""
        return RankMonitor(self.reading.rank.value, self.connections)

    def release_port(self) -> None:
        """Stop listening; `shutdown` does so even while a forked child still holds the socket."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()

    def close(self) -> None:
        """Release the port, and close the connections."""
        self.release_port()
        for connection in self.connections.values():
            connection.close()


@dataclass(slots=True)
class _OpenedResources:
    """The resources that a session has opened, and closes."""

    comm: TorchGroupComm
    joined: _Joined
    hooks: tuple[Callable[..., object], Callable[..., object]]
    timeout: float
    reset: Callable[[], None]

    def close(self, reason: str, failed: bool) -> None:
        self.reset()
        # First: ranks that have closed already may be joining the next world, perhaps on the same port.
        self.joined.release_port()
        still_ours = dist.is_initialized() and dist.group.WORLD is self.comm.group
        self.comm.shutdown(reason)
        if still_ours:
            dist.destroy_process_group()
        await_rest()
        before, theirs = self.hooks
        if sys.excepthook is theirs:
            sys.excepthook = before
        if self.joined.reading.rank.value == 0:
            serve_until_others_leave(self.joined.connections, timeout=_FAILED_SECONDS if failed else self.timeout)
        self.joined.close()


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
    timeout: float,
    check: bool,
    reset: Callable[[], None],
) -> Session:
    """Open the session of a process that has neither a session nor a process group; closing it calls `reset` first.

    Raises:
        JoinError: The ranks could not meet, or do not form one world.
        InvalidArgumentError: There is no such backend or device.
    """
    endpoint = choose(reading, launching_process=launching_process)
    if endpoint is None:
        joined = _Joined(JoinReply().complete(reading, "a world of one"), dist.HashStore(), {})
    else:
        joined = _join_with_device(reading, endpoint, backend, device, timeout=timeout, check=check)
    own = _select_device(joined, backend, device, timeout=timeout)
    registry = _new_registry(joined, own, timeout=timeout, check=check, endpoint=endpoint)
    return _open_group(joined, registry, choose_backend(backend, own), reset)


def _join_with_device(
    reading: LaunchEnvironment,
    endpoint: Endpoint,
    backend: str | None,
    device: str | torch.device | None,
    *,
    timeout: float,
    check: bool,
) -> _Joined:
    """Join the other ranks, and report to them if this rank has no device, as far as it knows its local rank."""
    chosen: torch.device | None = None
    problem: Exception | None = None
    try:
        if reading.local_rank is not None:
            chosen = choose_device(reading.local_rank.value, device)
        choose_backend(backend, chosen or torch.device("cpu"))
    except Exception as error:  # noqa: BLE001 - raised again below, after it was reported to the others
        problem = error
    request = JoinRequest.of(
        reading,
        host=socket.gethostname(),
        host_id=host_id(),
        process=os.getpid(),
        check=check,
        problem="" if problem is None else _message_for_others(problem),
    )
    try:
        return _join(reading, endpoint, request, timeout=timeout if problem is None else min(timeout, _REPORT_SECONDS))
    except JoinError as error:
        raise problem or error from error


def _select_device(
    joined: _Joined, backend: str | None, device: str | torch.device | None, *, timeout: float
) -> torch.device:
    """Select this rank's device, and wait until all ranks have selected theirs."""
    problem: Exception | None = None
    own = torch.device("cpu")
    try:
        own = choose_device(joined.reading.known_topology()["local_rank"].value, device)
        choose_backend(backend, own)
        bind(own)
    except Exception as error:  # noqa: BLE001 - raised again below, after it was reported to the others
        problem = error
    try:
        joined.monitor.monitored_barrier("" if problem is None else _message_for_others(problem), timeout=timeout)
    except BaseException as error:
        joined.close()
        if isinstance(error, JoinError) and problem is not None:
            raise problem from error
        raise
    return own


def _message_for_others(problem: Exception) -> str:
    """Return the message of an error for other ranks, with the class of an error that is not rankwise's own."""
    return str(problem) if isinstance(problem, RankwiseError) else f"{type(problem).__name__}: {problem}"


def _join(reading: LaunchEnvironment, endpoint: Endpoint, request: JoinRequest, *, timeout: float) -> _Joined:
    """Join the other ranks: over the store of the launcher's agent, or by a handshake with rank zero.

    Raises:
        JoinError: The ranks could not meet, or one of them cannot join.
    """
    if endpoint.agent_store:
        job = "" if reading.job is None else reading.job.value
        agents = store.connect(endpoint.host, endpoint.ports[0], timeout=timeout)
        joint = dist.PrefixStore(f"rankwise/{job}/{reading.attempt}", agents)
        reply, session_store = store.join_over_store(joint, request, timeout=timeout)
        return _Joined(_environment_of(reading, reply, endpoint, endpoint.ports[0]), session_store, {})
    if request.rank == 0:
        session_store, port = store.serve(one_host=endpoint.one_host, timeout=timeout)
        listener = handshake.listen_at(endpoint)
        try:
            reply, connections = handshake.serve(listener, endpoint, request, store_port=port, timeout=timeout)
            complete = _environment_of(reading, reply, endpoint, listener.getsockname()[1])
        except BaseException:
            listener.close()
            raise
        return _Joined(complete, session_store, connections, listener)
    reply, connection = handshake.connect(endpoint, request, timeout=timeout)
    try:
        complete = _environment_of(reading, reply, endpoint, connection.getpeername()[1])
        monitor = RankMonitor(request.rank, {0: connection})
        session_store = store.connect(endpoint.host, reply.store_port, timeout=timeout, lost=lambda: monitor.lost([0]))
        return _Joined(complete, session_store, {0: connection})
    except JoinError:
        connection.close()
        raise


def _environment_of(reading: LaunchEnvironment, reply: JoinReply, endpoint: Endpoint, port: int) -> LaunchEnvironment:
    """Return the environment completed with rank zero's reply and with the address where the ranks met."""
    host = (
        reading.host if reading.host and reading.host.value == endpoint.host else Fact(endpoint.host, endpoint.source)
    )
    return replace(reply.complete(reading), host=host, port=reading.port or Fact(port, endpoint.source))


def _new_registry(
    joined: _Joined, device: torch.device, *, timeout: float, check: bool, endpoint: Endpoint | None
) -> GroupRegistry:
    store = dist.PrefixStore("rankwise", joined.store)
    # The launcher's own numbers come first: those from the handshake depend on what other processes have sent.
    one_host = (endpoint is not None and endpoint.one_host) or joined.reading.known_topology()["num_nodes"].value == 1
    return GroupRegistry(
        rank=joined.reading.rank.value,
        device=device,
        timeout=timeout,
        check=check,
        one_host=one_host,
        store=lambda: store,
        own_address=lambda: LOOPBACK if endpoint is None else address_towards(endpoint.host, endpoint.ports[0]),
        find_dead_ranks=joined.monitor.lost,
    )


def _open_group(joined: _Joined, registry: GroupRegistry, backend: str, reset: Callable[[], None]) -> Session:
    preload_torch_functional()
    excepthook = sys.excepthook
    rank, world_size = joined.reading.rank.value, joined.reading.world_size.value
    comm: TorchGroupComm | None = None
    try:
        with gloo_on_loopback() if registry.one_host else contextlib.nullcontext():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", joined.store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=registry.timeout),
                # Bound early to its device, NCCL connects now and not in the first collective.
                device_id=registry.device if is_selectable(registry.device) else None,
            )
        comm = TorchGroupComm(dist.group.WORLD, ranks=range(world_size), registry=registry)
        comm.connect()
    except Exception as error:
        sys.excepthook = excepthook
        if comm is not None:
            comm.shutdown("could not join")
            dist.destroy_process_group()
        lost = joined.monitor.lost(range(world_size))
        why = f"{lost}. {error}" if lost and lost not in str(error) else str(error)
        text = f"rank {rank} of {world_size} met the others, but backend {backend!r} did not start: {why}"
        if rank == 0:
            joined.monitor.send(text)
        joined.close()
        raise JoinError(text) from error
    resources = _OpenedResources(
        comm=comm, joined=joined, hooks=(excepthook, sys.excepthook), timeout=registry.timeout, reset=reset
    )
    return Session(
        joined.reading,
        comm=comm,
        device=registry.device,
        group=comm.group,
        backend=backend,
        close=resources.close,
        settled=True,
    )
