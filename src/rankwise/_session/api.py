"""How a process joins its world, or a process group that is open already."""

from __future__ import annotations

import functools
import logging
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
import torch.distributed as dist

from rankwise._arguments import as_seconds
from rankwise._comm.data.torch_backend import TorchGroupComm
from rankwise._comm.group import Comm
from rankwise._comm.registry import World
from rankwise._environment.facts import Fact, Reading
from rankwise._integers import as_bool
from rankwise._net.host import address_towards
from rankwise._rendezvous.endpoint import parse_address
from rankwise._session import current
from rankwise._session.init_arguments import check_sources, given_place, join_in, require_same
from rankwise._session.lifecycle import open_session
from rankwise._session.session import Session
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError, NotJoinedError
from rankwise.topology import OPEN_GROUP

log = logging.getLogger(__name__)

# Ten years. Beyond what torch can count, a timeout is an overflow in C.
_LONGEST_SECONDS: Final = 10 * 365 * 24 * 3600


def init(  # noqa: PLR0913 - each is what some launcher leaves to its user
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: float = 300.0,
    launcher: str = "auto",
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    address: str | None = None,
    check: bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> Session:
    """Join the world that this process was launched into, and return the session: a context manager.

    Collective over the world. Works under every launcher that `rankwise env` knows, and alone, where it opens a process
    group of one, so that DDP and FSDP work there too. A process group that is open already is adopted, without talking;
    a session that is open already is joined in, and closing the inner one leaves it open. The session ends with the
    `with` block, with `finalize()`, or with the process.

    Args:
        backend: As torch writes it ("gloo", "cpu:gloo,cuda:nccl"); by default gloo for the CPU, and the accelerator's
            own beside it.
        device: This rank's device; by default its accelerator if it has one. "cpu" leaves accelerators alone.
        timeout: Seconds that joining may take, and every collective after it.
        launcher: The launcher whose variables count. "auto", by default, takes the first that fits of: "override", the
            variables RANKWISE_RANK and so on; "rankwise", which is `rankwise launch`; "torchrun"; "plain", RANK and
            WORLD_SIZE set by hand; "openmpi"; "intelmpi"; "mpich"; "slurm"; "none", a world of one.
        rank: This process's rank, instead of what the launcher says. Needs world_size.
        world_size: How many processes there are.
        local_rank: This process's rank on its node.
        local_world_size: How many processes are on its node.
        address: "host:port" that rank zero listens on, instead of what the launcher says.
        check: Check single tensors on accelerators too before they are reduced, which costs the host a
            round trip each; all else is always checked. By default what RANKWISE_CHECK says, 1 or 0.
        environ: The variables to read, instead of this process's own.

    Raises:
        LauncherEnvironmentError: The variables are incomplete, contradictory or unreadable.
        InvalidArgumentError: An argument cannot be used: no such backend, no such device; or the session or process
            group that is open already has another.
        JoinError: The ranks could not meet, or do not make one world.
        JoinTimeoutError: Not all ranks arrived in time; the message names those that are missing.

    Example:
        >>> import rankwise
        >>> with rankwise.init() as session:
        ...     print(session.rank, session.world_size)
        0 1
    """
    timeout = as_seconds(timeout, "timeout", most=_LONGEST_SECONDS)
    explicit = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "local_world_size": local_world_size}
    given = given_place(explicit)
    check_sources(launcher, environ, address)
    checks = None if check is None else as_bool(check, "check")
    opened = current.opened_session()
    if opened is not None and current.has_lost_its_group(opened):
        opened.close(failed=True)
        opened = None
    if opened is not None:
        return join_in(opened, backend, device, given)
    group = current.foreign_group()
    if group is not None:
        reading = _place_in(group, given, launcher, environ)
        session = adopt(group, reading, check=checks, close=lambda reason, _failed: _leave_adopted(comm, reason))
        comm = session.comm
        require_same(session, backend, device, given)
    else:
        reading = _reading(launcher, environ, given, address)
        checked = current.read_check(environ) if checks is None else checks
        session = open_session(reading, backend=backend, device=device, timeout=timeout, check=checked)
    current.put_in_force(session)
    log.debug("joined as %d of %d via %s", session.rank, session.world_size, session.reading.launcher)
    return session


def finalize() -> None:
    """Close the session that `init()` opened, and forget what was read. Without one, only forget.

    Local, but for rank zero, which waits until the others no longer need the store that it serves.

    Example:
        >>> finalize()
    """
    current.close_in_force()


def adopt(
    group: dist.ProcessGroup,
    reading: Reading | None = None,
    *,
    check: bool | None = None,
    close: Callable[[str, bool], None] | None = None,
) -> Session:
    """Return a session over a process group that somebody else opened. Does not talk, and closes nothing.

    Its ranks connect to each other in their first collective.

    Rank and world size are the group's; the other numbers are the launcher's, if it agrees on who this is.
    """
    if reading is None:
        reading = _place_in(group, {}, "auto", None)
    world_size = group.size()
    device = _group_device(group)
    ranks = range(world_size)
    world = _adopted_world(group, reading, ranks, device, check=current.read_check() if check is None else check)
    return Session(
        reading,
        comm=TorchGroupComm(group, ranks=ranks, world=world),
        device=device,
        group=group,
        backend=dist.get_backend_config(group),
        close=close,
        pid=current.opener(group),
    )


def _place_in(
    group: dist.ProcessGroup, given: Mapping[str, Fact[int]], launcher: str, environ: Mapping[str, str] | None
) -> Reading:
    """Return who this process is in a group that is open: its group knows, so variables that cannot be read may stand.

    Raises:
        InvalidArgumentError: The caller says otherwise.
    """
    rank, world_size = Fact(group.rank(), OPEN_GROUP), Fact(group.size(), OPEN_GROUP)
    for name, fact in (("rank", rank), ("world_size", world_size)):
        if name in given and given[name].value != fact.value:
            raise InvalidArgumentError(f"{name}={given[name].value}, but {OPEN_GROUP} that is open says {fact.value}")
    reading: Reading | None = None
    try:
        reading = current.read_environment(launcher, environ)
    except LauncherEnvironmentError as error:
        log.debug("the process group alone says who this is: %s", error)
    if reading is None or (reading.rank.value, reading.world_size.value) != (rank.value, world_size.value):
        if reading is not None and reading.world_size.value > 1:
            log.warning(
                "%s that is open says rank %s of %s, and counts; but the variables say rank %s of %s",
                OPEN_GROUP,
                rank.value,
                world_size.value,
                reading.rank,
                reading.world_size,
            )
        alone = world_size.value == 1
        reading = (
            current.read_environment("none") if alone else Reading(launcher="none", rank=rank, world_size=world_size)
        )
    return reading.placed(**given).placed(rank=rank, world_size=world_size)


def _leave_adopted(comm: Comm, reason: str) -> None:
    """Close what a session opened over a process group that other code opened, and leave that open."""
    current.forget()
    comm.dissolve_parts(reason)
    comm.leave(reason)


def adopt_part(group: dist.ProcessGroup, session: Session) -> Comm:
    """Return a comm over a process group that somebody else made between some ranks of a session. Does not talk.

    Its ranks connect to each other in their first collective. It is closed with the session, or before; the process
    group stays open.
    """
    ranks = dist.get_process_group_ranks(group)
    world = _adopted_world(group, session.reading, ranks, session.device, check=session.comm.check)
    part = TorchGroupComm(group, ranks=ranks, world=world)
    part.shared = ""
    session.comm.take_along(part)
    return part


def _adopted_world(
    group: dist.ProcessGroup, reading: Reading, ranks: Sequence[int], device: torch.device, *, check: bool
) -> World:
    rank = group.rank()
    group_ref = weakref.ref(group)

    @functools.cache
    def prefix() -> str:
        # A group can be adopted again and again: each time the ranks that talk count, and have a part for themselves.
        return f"rankwise/{group_store().add(f'rankwise/adopted/{rank}', 1)}"

    def group_store() -> dist.Store:
        adopted = group_ref()
        if adopted is None:
            raise NotJoinedError.destroyed()
        return adopted.get_group_store()

    def part() -> dist.Store:
        return dist.PrefixStore(prefix(), group_store())

    def reach() -> str:
        return socket.gethostname() if reading.host is None else address_towards(reading.host.value, 1)

    return World(
        rank=ranks[rank],
        device=device,
        timeout=group.get_group_store().timeout.total_seconds(),  # type: ignore[attr-defined]  # documented, but not in torch's stubs
        check=check,
        one_host=reading.is_one_host,
        store=part,
        reach=reach,
    )


def _reading(
    launcher: str, environ: Mapping[str, str] | None, given: Mapping[str, Fact[int]], address: str | None
) -> Reading:
    """Read the environment, and put the caller's arguments in its place."""
    if "rank" in given:
        reading = Reading(launcher="arguments", rank=given["rank"], world_size=given["world_size"])
        if reading.world_size.value == 1:
            reading = replace(current.read_environment("none"), launcher="arguments")
        elif address is None:
            around = current.read_environment(launcher, environ)
            reading = replace(
                reading,
                host=around.host,
                port=around.port,
                job=around.job,
                agent_store=around.agent_store,
                attempt=around.attempt,
            )
    else:
        reading = current.read_environment(launcher, environ)
    reading = reading.placed(**given)
    if address is not None:
        host, port = parse_address(address)
        reading = replace(reading, host=host, port=port, agent_store=False)
    return reading


def _group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device that a process group's owner uses: the current one of the accelerator it has a backend for."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    config = dist.get_backend_config(group)
    if accelerator is None or f"{accelerator.type}:" not in config or f"{accelerator.type}:gloo" in config:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
