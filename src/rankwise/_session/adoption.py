"""Sessions and groups over process groups that other code opened, which are not closed here."""

from __future__ import annotations

import functools
import logging
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from rankwise._backends import BackendConfig
from rankwise._comm.comm import Comm, open_comm
from rankwise._comm.control.links.connect import HostConnections
from rankwise._comm.control.registry import GroupRegistry
from rankwise._environment.facts import Fact, LaunchEnvironment
from rankwise._net.host import address_towards
from rankwise._net.job_secret import JobSecret
from rankwise._rendezvous.signed_store import part_of, signed
from rankwise._session.adopted_hosts import AdoptedHosts
from rankwise._session.environ import read_check, read_environment, read_secret, read_shared_memory
from rankwise._session.session import SessionState
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError, NotJoinedError
from rankwise.topology import OPEN_GROUP

log = logging.getLogger(__name__)


def adopt(
    group: dist.ProcessGroup,
    reading: LaunchEnvironment | None = None,
    *,
    check: bool | None = None,
    close: Callable[[str, bool], None] | None = None,
    pid: int | None = None,
    on_hosts: Callable[[HostConnections], None] | None = None,
) -> SessionState:
    """Return a session over a process group that other code opened, in this process or in its parent `pid`.

    Its ranks connect to each other in their first collective; or now, if `on_hosts` takes the connections for the
    processes that watch the hosts, and there may be several hosts.

    Rank and world size are the group's; the other numbers are the launcher's, if it agrees on those two.
    """
    if reading is None:
        reading = environment_in_group(group, {}, "auto", None)
    world_size = group.size()
    device = _group_device(group, reading)
    ranks = range(world_size)
    world = _adopted_registry(group, reading, ranks, device, check=read_check() if check is None else check)
    world.on_hosts = on_hosts
    if on_hosts is not None and not world.one_host and world_size > 1:
        world.connect()
    store = _group_store(group, world.secret)
    return SessionState(
        reading,
        comm=open_comm(group, ranks=ranks, registry=world),
        device=device,
        group=group,
        backend=dist.get_backend_config(group),
        close=close,
        pid=pid,
        timeout=world.timeout,
        hosts=AdoptedHosts(store, rank=group.rank(), world_size=world_size),
    )


def environment_in_group(
    group: dist.ProcessGroup, given: Mapping[str, Fact[int]], launcher: str, environ: Mapping[str, str] | None
) -> LaunchEnvironment:
    """Return the launch environment of a process whose group is open.

    The group determines rank and world size, so unreadable variables are not an error.

    Raises:
        InvalidArgumentError: The caller's arguments contradict the group.
    """
    rank, world_size = Fact(group.rank(), OPEN_GROUP), Fact(group.size(), OPEN_GROUP)
    for name, fact in (("rank", rank), ("world_size", world_size)):
        if name in given and given[name].value != fact.value:
            raise InvalidArgumentError(
                f"{name}={given[name].value}, but it is {fact.value} in {OPEN_GROUP} that is open"
            )
    reading: LaunchEnvironment | None = None
    try:
        reading = read_environment(launcher, environ)
    except LauncherEnvironmentError as error:
        log.debug("rank and world size come from the process group alone: %s", error)
    if reading is None or (reading.rank.value, reading.world_size.value) != (rank.value, world_size.value):
        if reading is not None and reading.world_size.value > 1:
            log.warning(
                "rank %s of %s in %s that is open is used, but the variables give rank %s of %s",
                rank.value,
                world_size.value,
                OPEN_GROUP,
                reading.rank,
                reading.world_size,
            )
        is_single = world_size.value == 1
        reading = (
            read_environment("none")
            if is_single
            else LaunchEnvironment(launcher="none", rank=rank, world_size=world_size)
        )
    return reading.with_topology(**given).with_topology(rank=rank, world_size=world_size)


def adopt_subgroup(group: dist.ProcessGroup, session: SessionState) -> Comm:
    """Return a comm over a process group that other code made between some ranks of a session. Does not communicate.

    Its ranks connect to each other in their first collective. It is closed with the session, or before; the process
    group stays open.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    world = _adopted_registry(group, session.reading, ranks, session.device, check=session.comm.control.checks_tensors)
    world.find_dead_ranks = session.comm.control.dead_ranks
    part = open_comm(group, ranks=ranks, registry=world)
    session.comm.add_child(part)
    return part


def _adopted_registry(
    group: dist.ProcessGroup, reading: LaunchEnvironment, ranks: Sequence[int], device: torch.device, *, check: bool
) -> GroupRegistry:
    rank = group.rank()
    secret = read_secret(one_host=reading.is_one_host)
    store = _group_store(group, secret)
    counting = threading.Lock()

    @functools.cache
    def counted_prefix() -> str:
        # A group can be adopted several times. Each rank counts its adoptions, so each has a key prefix of its own.
        return f"rankwise/{store().add(f'rankwise/adopted/{rank}', 1)}"

    def prefix() -> str:
        with counting:  # two threads would count an adoption twice
            return counted_prefix()

    def part() -> dist.Store:
        return part_of(store(), prefix())

    def own_address() -> str:
        return socket.gethostname() if reading.host is None else address_towards(reading.host.value, 1)

    return GroupRegistry(
        rank=ranks[rank],
        ranks=ranks,
        device=device,
        timeout=group.get_group_store().timeout.total_seconds(),  # type: ignore[attr-defined]  # documented, but not in torch's stubs
        check=check,
        one_host=reading.is_one_host,
        store=part,
        own_address=own_address,
        secret=secret,
        shares_tensors=read_shared_memory(),
    )


def _group_store(group: dist.ProcessGroup, secret: JobSecret | None) -> Callable[[], dist.Store]:
    """Return a function that returns the store of a group, with signed values, as long as the group exists."""
    group_ref = weakref.ref(group)

    def store() -> dist.Store:
        adopted = group_ref()
        if adopted is None:
            raise NotJoinedError.destroyed()
        return signed(adopted.get_group_store(), secret)

    return store


def _group_device(group: dist.ProcessGroup, reading: LaunchEnvironment) -> torch.device:
    """Return the device of a process group: an accelerator if the group has a backend for it, else the CPU.

    gloo does not count as one: it does not support all operations on tensors of an accelerator. The device is that to
    which the group is bound. Otherwise it is the current one; but where no program has selected one, that of the local
    rank.
    """
    bound: torch.device | None = group.bound_device_id
    if bound is not None and bound.index is not None:
        return bound
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    config = BackendConfig.parse(dist.get_backend_config(group))
    if accelerator is None or config.backend_for(accelerator.type) in {None, "gloo"}:
        return torch.device("cpu")
    index = torch.accelerator.current_device_index()
    if index == 0 and reading.local_rank is not None and reading.local_rank.value < torch.accelerator.device_count():
        index = reading.local_rank.value
    return torch.device(accelerator.type, index)
