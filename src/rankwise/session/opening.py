"""How a session is opened: meet the other ranks, take a device, open the process group; and how it is closed again."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from rankwise._torch import gloo_on_loopback
from rankwise.comm.torch_group import TorchGroupComm
from rankwise.comm.world import World
from rankwise.environment.reading import Fact, Reading
from rankwise.errors import JoinError, RankwiseError
from rankwise.rendezvous import LOOPBACK, Endpoint, choose
from rankwise.session import current, meeting, store
from rankwise.session.device import bind, choose_backend, choose_device
from rankwise.session.host import address_towards, host_id, starter
from rankwise.session.roll_call import Answer, Hello, ranks_text
from rankwise.session.session import Session

log = logging.getLogger(__name__)

# How long a rank that cannot join waits for the others to tell them why.
_FAREWELL_SECONDS: Final = 10.0
# How long rank zero waits for the others at the end before it says so.
_PATIENCE_SECONDS = 5.0
# How long the threads of a group that lives on may take to come to rest, how often in a row they are to be seen there,
# and the pause between two looks.
_REST_SECONDS: Final = 10.0
_LOOKS_AT_REST: Final = 2
_LOOK_SECONDS: Final = 0.001


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

    reading: Reading
    store: dist.Store
    lines: dict[int, socket.socket]
    listener: socket.socket | None = None

    def leave_port(self) -> None:
        """Let others have the port, also where a forked child has it still."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()


@dataclass(slots=True)
class _Opened:
    """What a session opened, and how to close it."""

    comm: TorchGroupComm
    met: _Met
    hooks: tuple[Callable[..., object], Callable[..., object]]
    timeout: float

    def close(self, reason: str, failed: bool) -> None:
        current.forget()
        self.met.leave_port()  # at once: ranks that have closed already may be on their way to the next world
        still_ours = dist.is_initialized() and dist.group.WORLD is self.comm.group
        self.comm.close(reason)
        if still_ours:
            dist.destroy_process_group()
        _await_rest()
        before, torchs = self.hooks
        if sys.excepthook is torchs:
            sys.excepthook = before
        if self.met.reading.rank.value == 0 and not failed:
            _outlive(self.met.lines, timeout=self.timeout)
        for line in self.met.lines.values():
            line.close()


def _outlive(lines: dict[int, socket.socket], *, timeout: float) -> None:
    """Serve the store until every other rank has hung up: one that has not may need it still."""
    start = time.monotonic()
    told = False
    with selectors.DefaultSelector() as selector:
        for rank, line in lines.items():
            selector.register(line, selectors.EVENT_READ, rank)
        while selector.get_map() and time.monotonic() - start < timeout:
            for key, _ in selector.select(_PATIENCE_SECONDS / 10):
                selector.unregister(key.fileobj)
            if not told and selector.get_map() and time.monotonic() - start > _PATIENCE_SECONDS:
                told = True
                absent = sorted(key.data for key in selector.get_map().values())
                log.warning("rank 0 waits up to %g s until %s leave(s)", timeout, ranks_text(absent))


def _await_rest() -> None:
    """Let the threads of groups that live on, as a DDP model keeps one, finish what they are at.

    A thread that has just ended a collective may have objects of Python's to give back, for which it needs Python's
    lock. If the model goes meanwhile, it waits for the thread and has the lock: for good. If the interpreter ends
    meanwhile, the thread takes it down. See docs/decisions/0006-letting-go-of-a-group.md.
    """
    start = time.monotonic()
    threads = [stat for stat in Path("/proc/self/task").glob("*/stat") if "(pt_gloo_runloop)" in _read(stat)]
    at_rest = 0
    while threads and at_rest < _LOOKS_AT_REST and time.monotonic() - start < _REST_SECONDS:
        time.sleep(_LOOK_SECONDS)  # one that sleeps until it gets the lock gets it now
        at_rest = 0 if any(") R " in _read(stat) for stat in threads) else at_rest + 1


def _read(stat: Path) -> str:
    """Return what Linux says of a thread, "7 (NAME) R ..." for one that runs; "" if it has ended."""
    with contextlib.suppress(OSError):
        return stat.read_text()
    return ""


def load_what_would_keep_a_group() -> None:
    """Import what takes the default group of that moment for a default argument, before there is one.

    Imported while a group is open, as by building an optimizer, it keeps that group alive for good. For the same reason
    nothing imports it where a group is adopted. See docs/decisions/0006-letting-go-of-a-group.md.
    """
    importlib.import_module("torch.distributed.nn.functional")


def open_session(
    reading: Reading, *, backend: str | None, device: str | torch.device | None, timeout: float, check: bool
) -> Session:
    """Open the session of a process that has none, and no process group either.

    Raises:
        JoinError: The ranks could not meet, or do not make one world.
        InvalidArgumentError: There is no such backend or device.
    """
    endpoint = choose(reading, starter=starter)
    if endpoint is None:
        own = choose_device(0, device)
        alone = _Met(Answer().complete(reading, "a world of one"), dist.HashStore(), {})
        world = _world(alone, own, timeout=timeout, check=check, endpoint=None)
        return _open_group(alone, world, choose_backend(backend, own))

    chosen: torch.device | None = None
    problem: Exception | None = None
    try:
        if reading.local_rank is not None:
            chosen = choose_device(reading.local_rank.value, device)
        choose_backend(backend, chosen or torch.device("cpu"))
    except Exception as error:  # noqa: BLE001 - raised again below, once the others have heard of it
        problem = error
    hello = Hello.of(
        reading,
        host=socket.gethostname(),
        host_id=host_id(),
        process=os.getpid(),
        check=check,
        problem="" if problem is None else _told(problem),
    )
    try:
        met = _meet(reading, endpoint, hello, timeout=timeout if problem is None else min(timeout, _FAREWELL_SECONDS))
    except JoinError as error:
        raise problem or error from error
    place = met.reading.place()
    if chosen is None:
        chosen = choose_device(place["local_rank"].value, device)
    world = _world(met, chosen, timeout=timeout, check=check, endpoint=endpoint)
    return _open_group(met, world, choose_backend(backend, chosen))


def _told(problem: Exception) -> str:
    """Return an error for other ranks: ours explain themselves, others need their name."""
    return str(problem) if isinstance(problem, RankwiseError) else f"{type(problem).__name__}: {problem}"


def _meet(reading: Reading, endpoint: Endpoint, hello: Hello, *, timeout: float) -> _Met:
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
        listener = meeting.listen_at(endpoint)
        try:
            answer, lines = meeting.host(listener, endpoint, hello, store_port=port, timeout=timeout)
            complete = _complete(reading, answer, endpoint, listener.getsockname()[1])
        except BaseException:
            listener.close()
            raise
        return _Met(complete, kept, lines, listener)
    answer, line = meeting.attend(endpoint, hello, timeout=timeout)
    try:
        complete = _complete(reading, answer, endpoint, line.getpeername()[1])
        return _Met(complete, store.connect(endpoint.host, answer.store_port, timeout=timeout), {0: line})
    except JoinError:
        line.close()
        raise


def _complete(reading: Reading, answer: Answer, endpoint: Endpoint, port: int) -> Reading:
    """Return the reading with what rank zero answered, and with where the ranks met."""
    host = (
        reading.host if reading.host and reading.host.value == endpoint.host else Fact(endpoint.host, endpoint.source)
    )
    return replace(answer.complete(reading), host=host, port=reading.port or Fact(port, endpoint.source))


def _world(met: _Met, device: torch.device, *, timeout: float, check: bool, endpoint: Endpoint | None) -> World:
    store = dist.PrefixStore("rankwise", met.store)
    # What the launcher says counts first: what was learned in the meeting, others may have had a hand in.
    one_host = (endpoint is not None and endpoint.one_host) or met.reading.place()["num_nodes"].value == 1
    return World(
        rank=met.reading.rank.value,
        device=device,
        timeout=timeout,
        check=check,
        one_host=one_host,
        store=lambda: store,
        reach=lambda: LOOPBACK if endpoint is None else address_towards(endpoint.host, endpoint.ports[0]),
    )


def _open_group(met: _Met, world: World, backend: str) -> Session:
    load_what_would_keep_a_group()
    bind(world.device)
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
                device_id=None if world.device.type in {"cpu", "mps"} else world.device,
            )
        comm = TorchGroupComm(dist.group.WORLD, ranks=range(world_size), world=world)
        comm.connect()
    except Exception as error:
        sys.excepthook = excepthook
        if comm is not None:
            comm.close("could not join")
            dist.destroy_process_group()
        met.leave_port()
        for line in met.lines.values():
            line.close()
        raise JoinError(
            f"rank {rank} of {world_size} met the others, but backend {backend!r} did not start: {error}"
        ) from error
    opened = _Opened(comm=comm, met=met, hooks=(excepthook, sys.excepthook), timeout=world.timeout)
    return Session(
        met.reading,
        comm=comm,
        device=world.device,
        group=comm.group,
        backend=backend,
        close=opened.close,
        settled=True,
    )
