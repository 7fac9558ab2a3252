"""What the ranks tell rank zero when they meet, and what it makes of it. Pure.

Every rank says who it thinks it is. Rank zero checks that the answers make one world, and learns from the hosts what
the launcher left out: who shares a node with whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from rankwise._environment.facts import MAX_PORT, Fact, LaunchEnvironment
from rankwise._net.json_lines import decode_line, encode_line
from rankwise._text import ranks_on_hosts_text, ranks_text
from rankwise.errors import JoinError, JoinTimeoutError, shortened

# What fits into a line of the meeting, however it has to be escaped.
_LONGEST_PROBLEM: Final = 4000
_LONGEST_ERROR: Final = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What one rank says of itself.

    Attributes:
        rank, world_size, local_rank, local_world_size, node_rank, num_nodes: As in Reading; None for unknown.
        host: The host's name, for people.
        host_id: What tells the host from others of the same name.
        process: The process's id, for people.
        check: Whether it checks single tensors on accelerators.
        job: What names its job, if its launcher says; "" for unknown.
        problem: Why this rank cannot join, or "".
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    host: str
    host_id: str
    process: int
    check: bool = False
    job: str = ""
    problem: str = ""

    @classmethod
    def of(
        cls, reading: LaunchEnvironment, *, host: str, host_id: str, process: int, check: bool, problem: str
    ) -> JoinRequest:
        """Say what a reading says."""

        def value(fact: Fact[int] | None) -> int | None:
            return None if fact is None else fact.value

        return cls(
            rank=reading.rank.value,
            world_size=reading.world_size.value,
            local_rank=value(reading.local_rank),
            local_world_size=value(reading.local_world_size),
            node_rank=value(reading.node_rank),
            num_nodes=value(reading.num_nodes),
            host=host,
            host_id=host_id,
            process=process,
            check=check,
            job="" if reading.job is None else reading.job.value,
            problem=shortened(problem, _LONGEST_PROBLEM),
        )

    def encode(self) -> str:
        return encode_line(self)

    @classmethod
    def decode(cls, text: str | bytes) -> JoinRequest:
        """Return what a rank said.

        Raises:
            ValueError: No rank says that.
        """
        hello = decode_line(cls, text)
        if not 0 <= hello.rank < hello.world_size:
            raise ValueError(f"rank {hello.rank} of {hello.world_size}")
        return hello


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReply:
    """What rank zero answers one rank.

    Attributes:
        error: Why the world cannot be joined, or "". The numbers mean nothing then.
        late: The error is that some did not arrive in time.
        local_rank, local_world_size, node_rank, num_nodes: The rank's place, complete.
        store_port: Where rank zero serves the store, if it does.
    """

    error: str = ""
    late: bool = False
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    store_port: int = 0

    def encode(self) -> str:
        return encode_line(replace(self, error=shortened(self.error, _LONGEST_ERROR)))

    @classmethod
    def decode(cls, text: str | bytes) -> JoinReply:
        """Return what rank zero answered.

        Raises:
            JoinError: It is no answer.
        """
        try:
            answer = decode_line(cls, text)
            if not 0 <= answer.store_port <= MAX_PORT:
                raise ValueError(f"port {answer.store_port}")  # noqa: TRY301 - as what cannot be read
        except ValueError as error:
            raise JoinError(
                f"what rank zero answered cannot be read: {error}; do all ranks run the same rankwise, and does "
                "another program use their store or port?"
            ) from error
        return answer

    def complete(self, reading: LaunchEnvironment, source: str = "the other ranks") -> LaunchEnvironment:
        """Return the reading with what it left out, and who says so.

        Raises:
            JoinError: The answer is an error.
            JoinTimeoutError: The error is that some did not arrive in time.
        """
        if self.error:
            raise (JoinTimeoutError if self.late else JoinError)(self.error)

        def learned(known: Fact[int] | None, value: int) -> Fact[int]:
            return known or Fact(value, source)

        return reading.with_topology(
            local_rank=learned(reading.local_rank, self.local_rank),
            local_world_size=learned(reading.local_world_size, self.local_world_size),
            node_rank=learned(reading.node_rank, self.node_rank),
            num_nodes=learned(reading.num_nodes, self.num_nodes),
        )


def conflict(first: JoinRequest, second: JoinRequest) -> str:
    """Return why these two cannot be ranks of one world, or ""."""
    if first.world_size != second.world_size:
        return (
            f"rank {first.rank} on {first.host} was told of {first.world_size} ranks, but rank {second.rank} on "
            f"{second.host} of {second.world_size}; start all with the same WORLD_SIZE"
        )
    if first.rank == second.rank:
        return (
            f"two processes say that they are rank {first.rank}: {first.process} on {first.host} and "
            f"{second.process} on {second.host}; give each its own RANK"
        )
    if first.check != second.check:
        return (
            f"rank {first.rank} has check={first.check}, but rank {second.rank} has check={second.check}; pass the "
            "same to init() on all ranks, or set RANKWISE_CHECK on all"
        )
    return ""


def another_job(first: JoinRequest, second: JoinRequest) -> str:
    """Return why the second is not of the first's job, or "" if it may be."""
    if not first.job or not second.job or first.job == second.job:
        return ""
    return (
        f"rank {second.rank} on {second.host} is of job {second.job!r}, but rank {first.rank} on {first.host} of job "
        f"{first.job!r}: two jobs use one port; choose another MASTER_PORT for one of them"
    )


def answers(hellos: Mapping[int, JoinRequest], *, store_port: int = 0) -> dict[int, JoinReply]:
    """Return the answer for each rank, once all have said hello.

    Nodes are counted in the order of their lowest rank, local ranks in the order of ranks.
    """
    problems = [
        f"rank {rank} on {hellos[rank].host}: {hellos[rank].problem}" for rank in sorted(hellos) if hellos[rank].problem
    ]
    if problems:
        return dict.fromkeys(hellos, JoinReply(error="; ".join(problems)))

    nodes: dict[tuple[str, str, int], list[int]] = {}
    holders: Counter[tuple[str, str, int | None]] = Counter()
    for rank in sorted(hellos):
        hello = hellos[rank]
        # Two ranks of one host with one local rank are on different nodes: a test cluster has several on one machine.
        holder = (hello.host, hello.host_id, hello.local_rank)
        nodes.setdefault((hello.host, hello.host_id, holders[holder]), []).append(rank)
        holders[holder] += hello.local_rank is not None
    return {
        rank: JoinReply(
            local_rank=local_rank,
            local_world_size=len(ranks),
            node_rank=node_rank,
            num_nodes=len(nodes),
            store_port=store_port,
        )
        for node_rank, ranks in enumerate(nodes.values())
        for local_rank, rank in enumerate(ranks)
    }


def missing(arrived: Mapping[int, JoinRequest], world_size: int, *, timeout: float) -> str:
    """Return the message for ranks that did not arrive in time."""
    absent = [rank for rank in range(world_size) if rank not in arrived]
    hosts = {rank: hello.host for rank, hello in arrived.items()}
    present = ranks_on_hosts_text(sorted(arrived), hosts if len(set(hosts.values())) > 1 else {})
    return (
        f"{ranks_text(absent)} of {world_size} did not arrive within {timeout:g} s; {present} did. "
        "Were they started, with the same WORLD_SIZE, and can they reach rank zero?"
    )
