"""The place of this host's ranks in the world of one attempt, on which its launcher and those of the other hosts agree.

Torch's rendezvous gives each host a number, and a store. In that store each launcher publishes how many ranks its host
has; the global ranks are counted in the order of the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from rankwise._launch.spec import LaunchSpec
from rankwise._net.json_lines import decode_line, encode_line
from rankwise._rendezvous.store import wait_for
from rankwise.errors import LaunchError

_AGREE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class _RanksOfHost:
    """What a launcher publishes.

    Attributes:
        number: The number of ranks of its host.
        role: The name of their role.
        attempt: The number that it would give this attempt.
    """

    number: int
    role: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of this host's ranks in the world of one attempt.

    Attributes:
        host, num_hosts: The number of this host, and of all.
        first_rank, world_size: The global rank of its first rank, and the number of ranks on all hosts.
        first_role_rank, role_world_size: The same, counted among the ranks that have the role of these.
        attempt: The number of the attempt, from 0; the same on all hosts.
        master_address, master_port: Where the ranks meet.
        store: The store of the launchers.
    """

    host: int = 0
    num_hosts: int = 1
    first_rank: int = 0
    world_size: int
    first_role_rank: int = 0
    role_world_size: int
    attempt: int
    master_address: str
    master_port: int
    store: Store

    def variables(self, spec: LaunchSpec, rendezvous: RendezvousHandler, local_rank: int) -> dict[str, str]:
        """Return the variables that torchrun sets for a rank."""
        values: dict[str, object] = {
            "LOCAL_RANK": local_rank,
            "RANK": self.first_rank + local_rank,
            "GROUP_RANK": self.host,
            "ROLE_RANK": self.first_role_rank + local_rank,
            "ROLE_NAME": spec.options.role,
            "LOCAL_WORLD_SIZE": spec.options.nproc,
            "WORLD_SIZE": self.world_size,
            "GROUP_WORLD_SIZE": self.num_hosts,
            "ROLE_WORLD_SIZE": self.role_world_size,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
            "TORCHELASTIC_RESTART_COUNT": self.attempt,
            "TORCHELASTIC_MAX_RESTARTS": spec.options.max_restarts,
            "TORCHELASTIC_RUN_ID": rendezvous.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": rendezvous.use_agent_store,
        }
        return {name: str(value) for name, value in values.items()}


def agree_on_place(met: RendezvousInfo, spec: LaunchSpec, attempt: int) -> Place:
    """Return the place of this host among those that have met. Collective over their launchers.

    Args:
        met: What the rendezvous has returned.
        spec: The ranks of this host.
        attempt: The number that this launcher would give the attempt. The greatest of all counts: a host that joins
            later has not counted those before, but ranks meet by the number, and never twice by the same.

    Raises:
        LaunchError: The launcher of another host did not go on, or the store failed.
    """
    own = _RanksOfHost(spec.options.nproc, spec.options.role, attempt)
    hosts = [own] if met.world_size == 1 else _published(met, own)
    local_address = None if spec.options.nodes is None else spec.options.nodes.local_address or None
    master = met.bootstrap_store_info or RendezvousStoreInfo.build(met.rank, met.store, local_address)
    before, role = hosts[: met.rank], hosts[met.rank].role
    return Place(
        host=met.rank,
        num_hosts=met.world_size,
        first_rank=_count(before),
        world_size=_count(hosts),
        first_role_rank=_count(before, role),
        role_world_size=_count(hosts, role),
        attempt=max(host.attempt for host in hosts),
        master_address=master.master_addr,
        master_port=master.master_port,
        store=met.store,
    )


def _published(met: RendezvousInfo, own: _RanksOfHost) -> list[_RanksOfHost]:
    """Publish the ranks of this host, and return those of all hosts."""
    keys = [f"rankwise-ranks/{host}" for host in range(met.world_size)]
    try:
        met.store.set(keys[met.rank], encode_line(own))
        if not wait_for(met.store, keys, timeout=_AGREE_SECONDS):
            text = f"the launchers of {met.world_size} hosts met, but not all of them go on: see their output"
            raise LaunchError(text)
        return [decode_line(_RanksOfHost, met.store.get(key)) for key in keys]
    except (RuntimeError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"the store where the launchers have met failed: {error}") from error


def _count(hosts: Sequence[_RanksOfHost], role: str | None = None) -> int:
    """Return the number of ranks of hosts: of all, or of those with a role."""
    return sum(host.number for host in hosts if role in {None, host.role})
