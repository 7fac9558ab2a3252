"""How a session is opened: meet the other ranks, take a device, open the process group."""

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
from rankwise._net.host import address_towards, host_id, starter
from rankwise._rendezvous import handshake, store
from rankwise._rendezvous.endpoint import Endpoint, choose
from rankwise._rendezvous.membership import JoinReply, JoinRequest
from rankwise._rendezvous.readiness import Watch
from rankwise._session.device import bind, choose_backend, choose_device, is_selectable
from rankwise._session.session import Session
from rankwise._session.shutdown import outlive
from rankwise._torch import gloo_on_loopback
from rankwise.errors import JoinError, RankwiseError

# How long a rank that cannot join waits for the others to tell them why.
_FAREWELL_SECONDS: Final = 10.0
# How long rank zero serves the store after an error, from which the others read why, as of a turn that has failed.
_FAILED_SECONDS: Final = 5.0


@dataclass(slots=True)
class _Met:
    """What ranks have once they have met.

    Attributes:
        reading: Who this process is, complete.
        store: What the ranks share.
        lines: On rank zero, if it serves the store, the open connection to each rank; on the others, the one to it.
        listener: On rank zero, where the ranks met. It stays until the session is closed: the port may be all that
            tells two jobs apart, so that another job there must hear that it is taken.
    """

    reading: LaunchEnvironment
    store: dist.Store
    lines: dict[int, socket.socket]
    listener: socket.socket | None = None

    @property
    def watch(self) -> Watch:
        """Who is still there of those that met."""
        return Watch(self.reading.rank.value, self.lines)

    def leave_port(self) -> None:
        """Let others have the port, also where a forked child has it still."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()

    def close(self) -> None:
        """Hang up, and let others have the port."""
        self.leave_port()
        for line in self.lines.values():
            line.close()


@dataclass(slots=True)
class _Opened:
    """What a session opened, and how to close it."""

    comm: TorchGroupComm
    met: _Met
    hooks: tuple[Callable[..., object], Callable[..., object]]
    timeout: float
    reset: Callable[[], None]

    def close(self, reason: str, failed: bool) -> None:
        self.reset()
        self.met.leave_port()  # at once: ranks that have closed already may be on their way to the next world
        still_ours = dist.is_initialized() and dist.group.WORLD is self.comm.group
        self.comm.shutdown(reason)
        if still_ours:
            dist.destroy_process_group()
        await_rest()
        before, torchs = self.hooks
        if sys.excepthook is torchs:
            sys.excepthook = before
        if self.met.reading.rank.value == 0:
            outlive(self.met.lines, timeout=_FAILED_SECONDS if failed else self.timeout)
        self.met.close()


def preload_torch_functional() -> None:
    """Import what takes the default group of that moment for a default argument, before there is one.

    Imported while a group is open, as by building an optimizer, it keeps that group alive for good. For the same reason
    nothing imports it where a group is adopted. See docs/decisions/0006-letting-go-of-a-group.md.
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
    """Open the session of a process that has none, and no process group either; closing it calls `reset` first.

    Raises:
        JoinError: The ranks could not meet, or do not make one world.
        InvalidArgumentError: There is no such backend or device.
    """
    endpoint = choose(reading, starter=starter)
    if endpoint is None:
        met = _Met(JoinReply().complete(reading, "a world of one"), dist.HashStore(), {})
    else:
        met = _meet_with_device(reading, endpoint, backend, device, timeout=timeout, check=check)
    own = _get_ready(met, backend, device, timeout=timeout)
    world = _world(met, own, timeout=timeout, check=check, endpoint=endpoint)
    return _open_group(met, world, choose_backend(backend, own), reset)


def _meet_with_device(
    reading: LaunchEnvironment,
    endpoint: Endpoint,
    backend: str | None,
    device: str | torch.device | None,
    *,
    timeout: float,
    check: bool,
) -> _Met:
    """Meet the other ranks, and tell them if this one finds no device, as far as it knows its place already."""
    chosen: torch.device | None = None
    problem: Exception | None = None
    try:
        if reading.local_rank is not None:
            chosen = choose_device(reading.local_rank.value, device)
        choose_backend(backend, chosen or torch.device("cpu"))
    except Exception as error:  # noqa: BLE001 - raised again below, once the others have heard of it
        problem = error
    hello = JoinRequest.of(
        reading,
        host=socket.gethostname(),
        host_id=host_id(),
        process=os.getpid(),
        check=check,
        problem="" if problem is None else _told(problem),
    )
    try:
        return _meet(reading, endpoint, hello, timeout=timeout if problem is None else min(timeout, _FAREWELL_SECONDS))
    except JoinError as error:
        raise problem or error from error


def _get_ready(met: _Met, backend: str | None, device: str | torch.device | None, *, timeout: float) -> torch.device:
    """Take this rank's device, and wait until all ranks have theirs."""
    problem: Exception | None = None
    own = torch.device("cpu")
    try:
        own = choose_device(met.reading.known_topology()["local_rank"].value, device)
        choose_backend(backend, own)
        bind(own)
    except Exception as error:  # noqa: BLE001 - raised again below, once the others have heard of it
        problem = error
    try:
        met.watch.confirm("" if problem is None else _told(problem), timeout=timeout)
    except BaseException as error:
        met.close()
        if isinstance(error, JoinError) and problem is not None:
            raise problem from error
        raise
    return own


def _told(problem: Exception) -> str:
    """Return an error for other ranks: ours explain themselves, others need their name."""
    return str(problem) if isinstance(problem, RankwiseError) else f"{type(problem).__name__}: {problem}"


def _meet(reading: LaunchEnvironment, endpoint: Endpoint, hello: JoinRequest, *, timeout: float) -> _Met:
    """Meet the other ranks.

    Raises:
        JoinError: They could not meet, or one of them cannot join.
    """
    if endpoint.agent_store:
        job = "" if reading.job is None else reading.job.value
        agents = store.connect(endpoint.host, endpoint.ports[0], timeout=timeout)
        joint = dist.PrefixStore(f"rankwise/{job}/{reading.attempt}", agents)
        answer, kept = store.roll_call(joint, hello, timeout=timeout)
        return _Met(_complete(reading, answer, endpoint, endpoint.ports[0]), kept, {})
    if hello.rank == 0:
        kept, port = store.serve(one_host=endpoint.one_host, timeout=timeout)
        listener = handshake.listen_at(endpoint)
        try:
            answer, lines = handshake.host(listener, endpoint, hello, store_port=port, timeout=timeout)
            complete = _complete(reading, answer, endpoint, listener.getsockname()[1])
        except BaseException:
            listener.close()
            raise
        return _Met(complete, kept, lines, listener)
    answer, line = handshake.attend(endpoint, hello, timeout=timeout)
    try:
        complete = _complete(reading, answer, endpoint, line.getpeername()[1])
        watch = Watch(hello.rank, {0: line})
        kept = store.connect(endpoint.host, answer.store_port, timeout=timeout, lost=lambda: watch.lost([0]))
        return _Met(complete, kept, {0: line})
    except JoinError:
        line.close()
        raise


def _complete(reading: LaunchEnvironment, answer: JoinReply, endpoint: Endpoint, port: int) -> LaunchEnvironment:
    """Return the reading with what rank zero answered, and with where the ranks met."""
    host = (
        reading.host if reading.host and reading.host.value == endpoint.host else Fact(endpoint.host, endpoint.source)
    )
    return replace(answer.complete(reading), host=host, port=reading.port or Fact(port, endpoint.source))


def _world(met: _Met, device: torch.device, *, timeout: float, check: bool, endpoint: Endpoint | None) -> GroupRegistry:
    store = dist.PrefixStore("rankwise", met.store)
    # What the launcher says counts first: what was learned in the meeting, others may have had a hand in.
    one_host = (endpoint is not None and endpoint.one_host) or met.reading.known_topology()["num_nodes"].value == 1
    return GroupRegistry(
        rank=met.reading.rank.value,
        device=device,
        timeout=timeout,
        check=check,
        one_host=one_host,
        store=lambda: store,
        own_address=lambda: LOOPBACK if endpoint is None else address_towards(endpoint.host, endpoint.ports[0]),
        find_dead_ranks=met.watch.lost,
    )


def _open_group(met: _Met, world: GroupRegistry, backend: str, reset: Callable[[], None]) -> Session:
    preload_torch_functional()
    excepthook = sys.excepthook
    rank, world_size = met.reading.rank.value, met.reading.world_size.value
    comm: TorchGroupComm | None = None
    try:
        with gloo_on_loopback() if world.one_host else contextlib.nullcontext():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", met.store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=world.timeout),
                # Bound early to its device, NCCL connects now and not in the first collective.
                device_id=world.device if is_selectable(world.device) else None,
            )
        comm = TorchGroupComm(dist.group.WORLD, ranks=range(world_size), registry=world)
        comm.connect()
    except Exception as error:
        sys.excepthook = excepthook
        if comm is not None:
            comm.shutdown("could not join")
            dist.destroy_process_group()
        lost = met.watch.lost(range(world_size))
        why = f"{lost}. {error}" if lost and lost not in str(error) else str(error)
        text = f"rank {rank} of {world_size} met the others, but backend {backend!r} did not start: {why}"
        if rank == 0:
            met.watch.tell(text)
        met.close()
        raise JoinError(text) from error
    opened = _Opened(comm=comm, met=met, hooks=(excepthook, sys.excepthook), timeout=world.timeout, reset=reset)
    return Session(
        met.reading,
        comm=comm,
        device=world.device,
        group=comm.group,
        backend=backend,
        close=opened.close,
        settled=True,
    )
