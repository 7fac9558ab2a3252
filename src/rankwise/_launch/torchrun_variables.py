"""The variables that torchrun sets for a rank, and the number of the attempt, which is the same on all hosts."""

from __future__ import annotations

from typing import Final

from torch.distributed.elastic.agent.server import Worker, WorkerGroup

from rankwise._rendezvous.store import wait_for
from rankwise.errors import LaunchError

_AGREE_SECONDS: Final = 60.0


def rank_variables(group: WorkerGroup, worker: Worker, attempt: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    spec = group.spec
    return {
        "LOCAL_RANK": str(worker.local_rank),
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
    }


def agreed_attempt(group: WorkerGroup, own: int) -> int:
    """Return the number of an attempt, from 0: the greatest of those that the launchers of its hosts propose.

    A host that joins later has not counted those before; but ranks meet by the number, and never twice by the same.

    Raises:
        LaunchError: The launcher of a host did not propose one.
    """
    store, num_hosts = group.store, group.group_world_size
    if store is None or num_hosts is None or num_hosts == 1:
        return own
    keys = [f"rankwise-attempt-number/{host}" for host in range(num_hosts)]
    try:
        store.set(keys[group.group_rank or 0], str(own))
        if not wait_for(store, keys, timeout=_AGREE_SECONDS):
            raise LaunchError(f"the launchers of {num_hosts} hosts met, but not all of them go on: see their output")
        return max(own, *(int(store.get(key)) for key in keys))
    except (RuntimeError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"the store where the launchers have met failed: {error}") from error
