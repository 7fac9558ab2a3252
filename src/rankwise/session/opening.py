"""How a session is opened: meet the other ranks, take a device, open the process group; and how it is closed again."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from rankwise._torch import gloo_on_loopback
from rankwise.comm.torch_group import TorchGroupComm
from rankwise.environment.reading import Reading
from rankwise.errors import JoinError, RankwiseError
from rankwise.rendezvous import Endpoint, choose
from rankwise.session import current, meeting, store
from rankwise.session.device import bind, choose_backend, choose_device
from rankwise.session.host import host_id, starter
from rankwise.session.roll_call import Hello, ranks_text
from rankwise.session.session import Session

log = logging.getLogger(__name__)

# How long a rank that cannot join waits for the others to tell them why.
_FAREWELL_SECONDS: Final = 10.0
# How long rank zero waits for the others at the end before it says so.
_PATIENCE_SECONDS = 5.0


@dataclass(slots=True)
class _Opened:
    """What a session opened, and how to close it."""

    comm: TorchGroupComm
    store: dist.Store
    hooks: tuple[Callable[..., object], Callable[..., object]]
    serves: bool
    timeout: float

    def close(self, failed: bool) -> None:
        current.forget()
        with contextlib.suppress(RuntimeError):  # the store is gone: whoever served it has left
            self.store.set(f"goodbye/{self.comm.rank}", "")
            self.store.add("goodbyes", 1)
        if self.serves and not failed:
            self._outlive_the_others()
        still_ours = dist.is_initialized() and dist.group.WORLD is self.comm.group
        self.comm.close()
        if still_ours:
            dist.destroy_process_group()
        before, torchs = self.hooks
        if sys.excepthook is torchs:
            sys.excepthook = before

    def _outlive_the_others(self) -> None:
        """Serve the store until every rank has said goodbye: a rank still needs it for new groups and for waiting."""
        start = time.monotonic()
        told = False
        while self.store.add("goodbyes", 0) < self.comm.size and time.monotonic() - start < self.timeout:
            if not told and time.monotonic() - start > _PATIENCE_SECONDS:
                told = True
                absent = [rank for rank in self.comm.ranks if not self.store.check([f"goodbye/{rank}"])]
                log.warning("rank 0 waits up to %g s until %s leave(s)", self.timeout, ranks_text(absent))
            time.sleep(0.01)


def open_session(
    reading: Reading, *, backend: str | None, device: str | torch.device | None, timeout: float
) -> Session:
    """Open the session of a process that has none, and no process group either.

    Raises:
        JoinError: The ranks could not meet, or do not make one world.
        InvalidArgumentError: There is no such backend or device.
    """
    endpoint = choose(reading, starter=starter)
    generation = current.next_generation()
    if endpoint is None:
        own = choose_device(0, device)
        return _open_group(reading, dist.HashStore(), own, backend, timeout=timeout, one_host=True, serves=False)

    chosen: torch.device | None = None
    problem: RankwiseError | None = None
    try:
        choose_backend(backend, torch.device("cpu"))
        if reading.local_rank is not None:
            chosen = choose_device(reading.local_rank.value, device)
    except RankwiseError as error:
        problem, timeout = error, min(timeout, _FAREWELL_SECONDS)
    hello = Hello.of(
        reading,
        host=socket.gethostname(),
        host_id=host_id(),
        process=os.getpid(),
        problem="" if problem is None else str(problem),
    )
    reading, kept, serves = _meet(reading, endpoint, hello, problem, generation=generation, timeout=timeout)
    place = reading.place()
    if chosen is None:
        chosen = choose_device(place["local_rank"].value, device)
    one_host = place["num_nodes"].value == 1
    return _open_group(reading, kept, chosen, backend, timeout=timeout, one_host=one_host, serves=serves)


def _meet(
    reading: Reading,
    endpoint: Endpoint,
    hello: Hello,
    problem: RankwiseError | None,
    *,
    generation: int,
    timeout: float,
) -> tuple[Reading, dist.Store, bool]:
    """Meet the other ranks.

    Returns:
        The complete reading, the store to share with them, and whether this rank serves it.

    Raises:
        RankwiseError: `problem`, if there is one, when the others were told of it.
        JoinError: They could not meet.
    """
    job = "" if reading.job is None else reading.job.value
    prefix = f"rankwise/{job}/{reading.attempt}/{generation}"
    try:
        if endpoint.agent_store:
            kept = store.prefixed(prefix, store.connect(endpoint.host, endpoint.ports[0], timeout=timeout))
            return store.roll_call(kept, hello, timeout=timeout).complete(reading), kept, False
        if hello.rank == 0:
            answer, listener = meeting.host(endpoint, hello, timeout=timeout)
            with listener:
                reading = answer.complete(reading)
                return reading, store.prefixed(prefix, store.serve(listener, timeout=timeout)), True
        answer, port = meeting.attend(endpoint, hello, timeout=timeout)
        reading = answer.complete(reading)
        return reading, store.prefixed(prefix, store.connect(endpoint.host, port, timeout=timeout)), False
    except JoinError as error:
        if problem is not None:
            raise problem from error
        raise


def _open_group(
    reading: Reading,
    kept: dist.Store,
    device: torch.device,
    backend: str | None,
    *,
    timeout: float,
    one_host: bool,
    serves: bool,
) -> Session:
    chosen = choose_backend(backend, device)
    bind(device)
    excepthook = sys.excepthook
    rank, world_size = reading.rank.value, reading.world_size.value
    try:
        with gloo_on_loopback() if one_host else contextlib.nullcontext():
            dist.init_process_group(
                chosen,
                store=store.prefixed("group", kept),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                # Bound early to its device, NCCL connects now and not in the first collective.
                device_id=None if device.type in {"cpu", "mps"} else device,
            )
    except (RuntimeError, ValueError) as error:
        sys.excepthook = excepthook
        raise JoinError(
            f"rank {rank} of {world_size} met the others, but backend {chosen!r} did not start: {error}"
        ) from error
    group = dist.group.WORLD
    if group is None:
        raise JoinError(f"backend {chosen!r} opened no process group")
    comm = TorchGroupComm(
        group, ranks=range(world_size), global_rank=rank, device=device, timeout=timeout, loopback=one_host
    )
    opened = _Opened(
        comm=comm,
        store=kept,
        hooks=(excepthook, sys.excepthook),
        serves=serves,
        timeout=timeout,
    )
    return Session(reading, comm=comm, device=device, group=group, backend=chosen, close=opened.close)
