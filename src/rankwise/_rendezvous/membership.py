"""The messages of joining, and how rank zero computes its replies from the requests. Pure.

Every rank sends its launcher's numbers. Rank zero checks that the requests form one world, and derives from the hosts
the numbers that the launcher did not set: which ranks share a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rankwise._environment.facts import MAX_PORT, Fact, LaunchEnvironment
from rankwise._net.json_lines import decode_line, encode_line
from rankwise._text import ranks_on_hosts_text, ranks_text
from rankwise.errors import JoinError, JoinTimeoutError, shortened

# Short enough for a line of the handshake, even if every character has to be escaped.
_LONGEST_PROBLEM: Final = 4000
_LONGEST_ERROR: Final = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """The description of one rank, which it sends to rank zero.

    Attributes:
        rank, world_size, local_rank, local_world_size, node_rank, num_nodes: As in `LaunchEnvironment`; None if
            unknown.
        host: The name of the host, for messages.
        host_id: A unique id of the host: hosts may have the same name.
        process: The id of the process, for messages.
        check: Whether the rank checks single tensors on accelerators.
        job: The id of its job, if the launcher sets one; "" if unknown.
        problem: Why this rank cannot join; "" if it can.
        reached: The address of another host at which it has reached the store there; "" if the store is on its own.
        device: The device that the rank has chosen: "cuda:1"; "" if it does not know yet which one.
        device_uuid: The unique id of this device, if it can be a member of a group once only; "" otherwise.
        backend: The backends that it has chosen, as torch writes them; "" if these are not compared.
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
    reached: str = ""
    device: str = ""
    device_uuid: str = ""
    backend: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")

    @classmethod
    def of(
        cls, reading: LaunchEnvironment, *, host: str, host_id: str, process: int, check: bool, problem: str
    ) -> JoinRequest:
        """Return the request of the rank that an environment describes."""

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
        """Return the request in a line.

        Raises:
            ValueError: The line is not the request of a rank.
        """
        return decode_line(cls, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReply:
    """The reply of rank zero to one rank.

    Attributes:
        error: Why the world cannot be joined, or "". With an error, the numbers have no meaning.
        late: The error is that some ranks did not arrive in time.
        local_rank, local_world_size, node_rank, num_nodes: The topology of the rank, beside rank and world
            size.
        store_port: The port of the store that rank zero serves; 0 if it serves none.
        host_address: The address of the store's host that ranks of other hosts have connected to; "" if unknown.
    """

    error: str = ""
    late: bool = False
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    store_port: int = 0
    host_address: str = ""

    def encode(self) -> str:
        return encode_line(replace(self, error=shortened(self.error, _LONGEST_ERROR)))

    @classmethod
    def decode(cls, text: str | bytes) -> JoinReply:
        """Return the reply in a line.

        Raises:
            JoinError: The line is not a reply.
        """
        try:
            reply = decode_line(cls, text)
            if not 0 <= reply.store_port <= MAX_PORT:
                raise ValueError(f"port {reply.store_port}")  # noqa: TRY301 - as malformed
        except ValueError as error:
            raise JoinError(
                f"the reply of rank zero is malformed: {error}; do all ranks run the same version of rankwise, and "
                "does another program use their store or port?"
            ) from error
        return reply

    def complete(self, reading: LaunchEnvironment, source: str = "the other ranks") -> LaunchEnvironment:
        """Return the environment with its missing numbers taken from this reply; their source is `source`.

        Raises:
            JoinError: The reply is an error.
            JoinTimeoutError: The error is that some ranks did not arrive in time.
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
    """Return why two requests cannot be from ranks of one world; "" if they can."""
    if first.world_size != second.world_size:
        return (
            f"rank {first.rank} on {first.host} has a world size of {first.world_size}, but rank {second.rank} on "
            f"{second.host} has {second.world_size}; start all with the same WORLD_SIZE"
        )
    if first.rank == second.rank:
        return (
            f"two processes have rank {first.rank}: {first.process} on {first.host} and "
            f"{second.process} on {second.host}; give each its own RANK"
        )
    if first.check != second.check:
        return (
            f"rank {first.rank} has check={first.check}, but rank {second.rank} has check={second.check}; pass the "
            "same to init() on all ranks, or set RANKWISE_CHECK on all"
        )
    return ""


def job_conflict(first: JoinRequest, second: JoinRequest) -> str:
    """Return why the second request is from another job than the first; "" if it may be from the same."""
    if not first.job or not second.job or first.job == second.job:
        return ""
    return (
        f"rank {second.rank} on {second.host} is in job {second.job!r}, but rank {first.rank} on {first.host} is in "
        f"job {first.job!r}: two jobs use one port; choose another MASTER_PORT for one of them"
    )


def replies_to(
    requests: Mapping[int, JoinRequest], *, store_port: int = 0, host_address: str = ""
) -> dict[int, JoinReply]:
    """Return the reply to each rank, given the requests of all.

    Nodes are numbered in the order of their lowest rank, local ranks in the order of ranks.
    """
    problems = [
        f"rank {rank} on {requests[rank].host}: {requests[rank].problem}"
        for rank in sorted(requests)
        if requests[rank].problem
    ]
    problems = problems or [*_different_backends(requests), *_shared_devices(requests)]
    if problems:
        return dict.fromkeys(requests, JoinReply(error="; ".join(problems)))

    nodes: dict[tuple[str, str, int], list[int]] = {}
    same_local_rank: Counter[tuple[str, str, int | None]] = Counter()
    for rank in sorted(requests):
        request = requests[rank]
        # Ranks of one host that have the same local rank are on different nodes: a test cluster has several nodes on
        # one machine. So the n-th rank with a host and local rank is on the n-th node of that host.
        node_index = same_local_rank[request.host, request.host_id, request.local_rank]
        nodes.setdefault((request.host, request.host_id, node_index), []).append(rank)
        same_local_rank[request.host, request.host_id, request.local_rank] += request.local_rank is not None
    return {
        rank: JoinReply(
            local_rank=local_rank,
            local_world_size=len(ranks),
            node_rank=node_rank,
            num_nodes=len(nodes),
            store_port=store_port,
            host_address=host_address,
        )
        for node_rank, ranks in enumerate(nodes.values())
        for local_rank, rank in enumerate(ranks)
    }


def _different_backends(requests: Mapping[int, JoinRequest]) -> Iterator[str]:
    """Yield a problem if the ranks have chosen different backends: because of their arguments, or of their devices."""
    by_choice: dict[tuple[str, str], list[int]] = {}
    for rank, request in sorted(requests.items()):
        by_choice.setdefault((request.backend, request.device.partition(":")[0]), []).append(rank)
    if len({backend for backend, _ in by_choice}) == 1:
        return
    hosts = {rank: request.host for rank, request in requests.items()}
    choices = [
        f"{ranks_on_hosts_text(ranks, hosts)}: {device or 'an accelerator'}, backend {backend!r}"
        for (backend, device), ranks in by_choice.items()
    ]
    yield (
        f"the ranks have chosen different devices or backends ({'; '.join(choices)}): a rank that sees no accelerator "
        "takes the CPU; mend that, or pass the same device= and backend= to init() on all ranks"
    )


def _shared_devices(requests: Mapping[int, JoinRequest]) -> Iterator[str]:
    """Yield a problem for each device that several ranks have chosen, which its backend does not allow."""
    by_device: dict[str, list[int]] = {}
    for rank, request in sorted(requests.items()):
        if request.device_uuid:
            by_device.setdefault(request.device_uuid, []).append(rank)
    for uuid, ranks in by_device.items():
        if len(ranks) > 1:
            request = requests[ranks[0]]
            yield (
                f"{ranks_text(ranks)} on {request.host} have the same device, {request.device} ({uuid}), which "
                f"{request.backend!r} does not allow: start one rank for each device, make another device visible to "
                "each rank (CUDA_VISIBLE_DEVICES), or pass device='cpu' to init()"
            )


def missing(arrived: Mapping[int, JoinRequest], world_size: int, *, timeout: float) -> str:
    """Return the error message for the ranks that did not arrive in time."""
    absent = [rank for rank in range(world_size) if rank not in arrived]
    hosts = {rank: request.host for rank, request in arrived.items()}
    present = ranks_on_hosts_text(sorted(arrived), hosts if len(set(hosts.values())) > 1 else {})
    return (
        f"{ranks_text(absent)} of {world_size} did not arrive within {timeout:g} s; {present} did. "
        "Were they started, with the same WORLD_SIZE, and can they reach rank zero?"
    )
