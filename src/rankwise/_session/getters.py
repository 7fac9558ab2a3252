"""Who am I: what a process can ask without talking to anybody."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from rankwise._environment.facts import Fact
from rankwise._session.current import Current, current_session, thread_local
from rankwise.errors import NotJoinedError
from rankwise.topology import Topology, unknown

if TYPE_CHECKING:
    import torch


def get_rank() -> int:
    """Return this process's rank among all, from 0.

    Local. Right before `init()` under any launcher, and 0 alone. A process group that somebody else opened counts.

    Raises:
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> get_rank()
        0
    """
    # What current_session() does first, without the call: programs ask for their rank in every log line.
    session = thread_local.session
    if session is None:
        session = Current.inferred
    if session is None or not (session.settled or Current.groups.WORLD is session.group_ref()):
        session = current_session()
    return session.rank


def get_world_size() -> int:
    """Return how many processes there are; 1 alone.

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
        NotJoinedError: The launcher does not say; `init()` finds out.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.
    """
    return _known("local_rank")


def get_local_world_size() -> int:
    """Return how many processes are on this node.

    Local.

    Raises:
        NotJoinedError: The launcher does not say; `init()` finds out.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.
    """
    return _known("local_world_size")


def get_node_rank() -> int:
    """Return this node's number among all, from 0.

    Local.

    Raises:
        NotJoinedError: The launcher does not say (Open MPI and MPICH on several hosts); `init()` finds out.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.
    """
    return _known("node_rank")


def get_num_nodes() -> int:
    """Return how many nodes there are.

    Local.

    Raises:
        NotJoinedError: The launcher does not say (Open MPI and MPICH on several hosts); `init()` finds out.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.
    """
    return _known("num_nodes")


def is_rank_zero() -> bool:
    """Whether this is rank zero of the world; true alone.

    Local.

    Raises:
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> is_rank_zero()
        True
    """
    return get_rank() == 0


def topology() -> Topology:
    """Return the place of this process, complete.

    Local.

    Raises:
        NotJoinedError: The launcher does not say all of it; `init()` finds out.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> topology()
        Topology(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)
    """
    return current_session().topology


def hostname() -> str:
    """Return this host's name.

    Local. From the host itself: HOSTNAME is wrong under sbatch.
    """
    return socket.gethostname()


def device() -> torch.device:
    """Return this rank's device: its accelerator, or the CPU.

    Local. Before `init()` it is only named, not made the current one.

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
    """
    return current_session().backend


def explain() -> str:
    """Return who this process is as text, a line for each value with what decided it.

    Local.

    Raises:
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.
    """
    session = current_session()
    lines = [("launcher", session.reading.launcher, ""), *fact_lines(session.reading.facts())]
    if session.backend is not None:
        lines.append(("backend", session.backend, "the process group"))
    width = max(len(name) for name, _, _ in lines)
    shown = max(len(value) for _, value, _ in lines)
    return "\n".join(f"{name:<{width}}  {value:<{shown}}  {source}".rstrip() for name, value, source in lines)


def fact_lines(facts: dict[str, Fact[int] | Fact[str] | None]) -> list[tuple[str, str, str]]:
    """Return name, value and source of each fact, for people."""
    return [
        (name, "-", "not known before init()" if name not in {"host", "port", "job"} else "not set")
        if fact is None
        else (name, str(fact.value), fact.source)
        for name, fact in facts.items()
    ]


def _known(name: str) -> int:
    reading = current_session().reading
    fact: Fact[int] | None = getattr(reading, name)
    if fact is None:
        raise NotJoinedError(unknown(reading, name))
    return fact.value
