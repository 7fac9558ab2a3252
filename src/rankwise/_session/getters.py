"""The getters: rank, topology, device, backend and store of this process.

They do not communicate; but in a process group that other code opened, the first that needs a number which no variable
has waits until all ranks have called `init()`.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from rankwise._environment.facts import Fact
from rankwise._session.current import Current, current_session, joined_session, thread_local
from rankwise._session.environ import own_restart_count
from rankwise._user_frames import strip_internal_frames
from rankwise.errors import NotJoinedError, RankwiseError
from rankwise.topology import Topology, unknown

if TYPE_CHECKING:
    import torch

    from rankwise._session.key_value_store import Store


def get_rank() -> int:
    """Return this process's rank among all, from 0.

    Local. Correct before `init()` under any launcher; 0 without one. A process group that other code opened takes
    precedence over the variables.

    Raises:
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> get_rank()
        0
    """
    # The first part of current_session(), without the cost of the call: programs get their rank for every log line.
    session = thread_local.session
    if session is None:
        session = thread_local.inferred
    if session is None or not (session.settled or Current.groups.WORLD is session.group_ref()):
        session = current_session()
    return session.rank


def get_world_size() -> int:
    """Return the number of processes; 1 without a launcher.

    Local.

    Raises:
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> get_world_size()
        1
    """
    return current_session().world_size


def get_local_rank() -> int:
    """Return this process's rank among those on its node, from 0.

    Local.

    Raises:
        NotJoinedError: The launcher does not set it; `init()` computes it.
        JoinTimeoutError: Other code opened the process group, no variable has it, and not all ranks called `init()`.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> get_local_rank()  # of rank 5, on the second of two nodes with 4 ranks each: 1
        0
    """
    return _known_number("local_rank")


def get_local_world_size() -> int:
    """Return the number of processes on this node.

    Local.

    Raises:
        NotJoinedError: The launcher does not set it; `init()` computes it.
        JoinTimeoutError: Other code opened the process group, no variable has it, and not all ranks called `init()`.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> get_local_world_size()  # on two nodes with 4 ranks each: 4
        1
    """
    return _known_number("local_world_size")


def get_node_rank() -> int:
    """Return the index of this node among all, from 0.

    Local.

    Raises:
        NotJoinedError: The launcher does not set it (Open MPI and MPICH on several hosts); `init()` computes it.
        JoinTimeoutError: Other code opened the process group, no variable has it, and not all ranks called `init()`.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> get_node_rank()  # of rank 5, on the second of two nodes with 4 ranks each: 1
        0
    """
    return _known_number("node_rank")


def get_num_nodes() -> int:
    """Return the number of nodes.

    Local.

    Raises:
        NotJoinedError: The launcher does not set it (Open MPI and MPICH on several hosts); `init()` computes it.
        JoinTimeoutError: Other code opened the process group, no variable has it, and not all ranks called `init()`.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> get_num_nodes()  # on two nodes with 4 ranks each: 2
        1
    """
    return _known_number("num_nodes")


def store() -> Store:
    """Return the key-value store of the session, for texts and bytes that ranks pass to each other at any time.

    Local. Collectives are simpler where all ranks take part; a store is for ranks that need not wait for each other, as
    in a queue of work. `get` and `wait` wait until a value is there; `set`, `check`, `add` for counters, `compare_set`
    and `delete` do not.

    Raises:
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> store = rankwise.store()
        >>> if rankwise.is_rank_zero():
        ...     store.set("address", "node1:8000")
        >>> store.get("address", timeout=60)
        'node1:8000'
        >>> store.add("items taken")  # 1 on the first rank that calls it, then 2, and so on
        1
    """
    try:
        return joined_session().store
    except RankwiseError as error:
        strip_internal_frames(error.__traceback__, error)
        raise


def is_rank_zero() -> bool:
    """Return whether this process is rank zero of the world; true without a launcher.

    Local.

    Raises:
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> is_rank_zero()
        True
    """
    return get_rank() == 0


def topology() -> Topology:
    """Return the topology of this process: all six numbers.

    Local.

    Raises:
        NotJoinedError: The launcher does not set all of it; `init()` computes the rest.
        JoinTimeoutError: Other code opened the process group, no variable has it, and not all ranks called `init()`.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> topology()
        Topology(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)
    """
    return current_session().topology


def restart_count() -> int:
    """Return how often the ranks of this job were started again after a failure; 0 in the first attempt.

    Local. It is the sum of TORCHELASTIC_RESTART_COUNT, of `rankwise launch --max-restarts` and torchrun, and of
    SLURM_RESTART_COUNT, of a job that Slurm has requeued.

    Raises:
        LauncherEnvironmentError: A variable is not a whole number.

    Example:
        >>> restart_count()
        0
    """
    return own_restart_count()


def hostname() -> str:
    """Return this host's name.

    Local. Not from HOSTNAME, which is wrong under sbatch.

    Example:
        >>> import socket
        >>> hostname() == socket.gethostname()
        True
    """
    return socket.gethostname()


def device() -> torch.device:
    """Return this rank's device: its accelerator, or the CPU.

    Local. Before `init()` it is not yet the current device of the accelerator.

    Raises:
        JoinError: There are several devices, but none for this local rank.

    Example:
        >>> device().type in {"cpu", "cuda", "mps", "xpu"}
        True
    """
    return current_session().device


def backend() -> str | None:
    """Return the backends of the process group, as torch writes them ("cpu:gloo,cuda:nccl"); None if there is no group.

    Local.

    Example:
        >>> import rankwise
        >>> with rankwise.init(device="cpu"):
        ...     backend()  # with CUDA devices: 'cpu:gloo,cuda:nccl'
        'gloo'
    """
    return current_session().backend


def explain() -> str:
    """Return a text with a line for each fact about this process: its name, value and source.

    Local.

    Raises:
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> print(explain().splitlines()[0])  # under torchrun: launcher  torchrun
        launcher          none
    """
    session = current_session()
    lines = [("launcher", session.reading.launcher, ""), *fact_lines(session.reading.facts())]
    if session.backend is not None:
        lines.append(("backend", session.backend, "the process group"))
    width = max(len(name) for name, _, _ in lines)
    shown = max(len(value) for _, value, _ in lines)
    return "\n".join(f"{name:<{width}}  {value:<{shown}}  {source}".rstrip() for name, value, source in lines)


def fact_lines(facts: dict[str, Fact[int] | Fact[str] | None]) -> list[tuple[str, str, str]]:
    """Return name, value and source of each fact, as text."""
    return [
        (name, "-", "not known before init()" if name not in {"host", "port", "job"} else "not set")
        if fact is None
        else (name, str(fact.value), fact.source)
        for name, fact in facts.items()
    ]


def _known_number(name: str) -> int:
    session = current_session()
    fact: Fact[int] | None = getattr(session.reading, name) or getattr(session.complete_topology(), name)
    if fact is None:
        raise NotJoinedError(unknown(session.reading, name))
    return fact.value
