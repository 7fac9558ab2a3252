"""The times of one collective at one size: ours, the backend's own and the limit alternate, in blocks of calls.

The time of a call is that of its slowest rank. A block is timed without a pause between its calls, as
`torch.utils.benchmark` and nccl-tests do: the time of a row is the mean of a block, and of all blocks the median.
"""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from rankwise._backends import BackendConfig
from rankwise._bench.operations import OPERATIONS, Memory
from rankwise._bench.results import Environment, Row
from rankwise._collectives.all_gather import all_gather
from rankwise._collectives.groups import barrier
from rankwise._collectives.reduce import all_reduce
from rankwise._memory import require_available
from rankwise._session.getters import hostname
from rankwise._session.session import Session
from rankwise.errors import InvalidArgumentError, RankwiseError, summary

Call: TypeAlias = Callable[[], object]

OURS: Final = "rankwise"
_LIMIT: Final = "limit"
_WARM_UP: Final = 5
# Long enough that the moments at which ranks begin a block do not matter, short enough that both sides see one machine.
_BLOCK_SECONDS: Final = 0.02
_MOST_CALLS, _FEWEST_ROUNDS, _MOST_ROUNDS = 1000, 5, 1000
# What a row may take, in sizes: two buffers, those of the copy, the result of our call, and what backends add.
_BUFFERS: Final = 6


class AgreedError(RankwiseError):
    """An error that all ranks raise, of which it is enough if one speaks."""


def agree(problem: str) -> None:
    """Raise on all ranks what is wrong on some of them.

    Collective.

    Raises:
        AgreedError: A rank has a problem.
    """
    found = all_gather((hostname(), problem))
    if texts := [f"rank {rank} on {host}: {text}" for rank, (host, text) in enumerate(found) if text]:
        raise AgreedError("; ".join(texts))


def process_group(session: Session) -> dist.ProcessGroup:
    """Return the process group of a session.

    Raises:
        InvalidArgumentError: It has none.
    """
    if session.group is None:
        raise InvalidArgumentError(f"bench measures process groups of torch, and {session!r} has none")
    return session.group


def environment(session: Session) -> Environment:
    """Return where and with what this rank measures."""
    backend = BackendConfig.parse(session.backend or "none").backend_for(session.device.type) or "none"
    name_of = getattr(torch.get_device_module(session.device), "get_device_name", None)
    return Environment(
        ranks=session.world_size,
        hosts=session.topology.num_nodes,
        backend=backend,
        device="cpu" if name_of is None else name_of(session.device),
        host=hostname(),
        rankwise=importlib.metadata.version("rankwise"),
        torch=torch.__version__,
        python=platform.python_version(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else "",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def measure(
    session: Session, where: Environment, name: str, nbytes: int, *, dtype: torch.dtype, seconds: float
) -> list[Row]:
    """Return the rows of a collective at a size: ours, and the backend's.

    Collective over the world.

    Args:
        session: The session.
        where: The environment, for the rows.
        name: The name of the collective.
        nbytes: The size, which is rounded to elements of all ranks.
        dtype: The dtype.
        seconds: How long the measurement may take, for both and the limit together; there are at least five blocks.

    Raises:
        AgreedError: A rank has too little memory.
        RankwiseError: A rank is lost, or the backend has failed.
    """
    operation = OPERATIONS[name]
    parts = session.world_size if operation.has_parts else 1
    count = max(1, nbytes // (dtype.itemsize * parts)) if operation.has_data else 0
    nbytes = count * dtype.itemsize * parts
    problem = ""
    try:
        require_available(_BUFFERS * nbytes * session.topology.local_world_size)
        memory = _allocate(session, count, parts, dtype)
    except (MemoryError, RuntimeError) as error:  # torch's own are RuntimeErrors
        problem = f"{name} of {nbytes} bytes does not fit into memory, choose a smaller --maxbytes: {summary(error)}"
    agree(problem)
    sides: dict[str, Call] = {OURS: partial(operation.ours, memory), where.backend: partial(operation.backends, memory)}
    if operation.has_data:
        sides[_LIMIT] = _limit(session, memory)
    times = time_calls(sides, seconds=seconds, device=session.device)
    typical = {side: statistics.median(blocks) for side, (blocks, _) in times.items()}
    speeds = {side: nbytes / each / 1e9 for side, each in typical.items()}
    return [
        Row(
            **asdict(where),
            collective=name,
            size=nbytes,
            count=count,
            type=str(dtype).removeprefix("torch.") if operation.has_data else "none",
            op=operation.op,
            by=side,
            time_us=typical[side] * 1e6,
            algbw=speeds[side],
            busbw=speeds[side] * operation.bus_factor(session.world_size),
            p50_us=float(times[side][1].quantile(0.5)) * 1e6,
            p99_us=float(times[side][1].quantile(0.99)) * 1e6,
            limit=speeds.get(_LIMIT, 0.0),
            calls=len(times[side][1]),
        )
        for side in (OURS, where.backend)
    ]


def _allocate(session: Session, count: int, parts: int, dtype: torch.dtype) -> Memory:
    # Written to, since memory that was never written has no pages; zeros, whose sums stay what they are.
    part = torch.empty(count, dtype=dtype, device=session.device).fill_(0)
    whole = part.repeat(parts) if parts > 1 else part
    other = torch.empty_like(whole).fill_(0)
    return Memory(process_group(session), part, whole, list(whole.chunk(parts)), other)


def _limit(session: Session, memory: Memory) -> Call:
    """Return what no collective exceeds for long: a copy in memory, by all ranks at once; between hosts, the links.

    Of each host the first rank sends to the next host, and receives from the one before: the slowest link counts.
    """
    if session.topology.num_nodes == 1:
        return lambda: memory.other.copy_(memory.whole)
    firsts = [rank for rank, is_first in enumerate(all_gather(session.topology.local_rank == 0)) if is_first]
    if session.rank not in firsts:
        return lambda: None
    place = firsts.index(session.rank)
    return partial(_exchange, memory, to=firsts[(place + 1) % len(firsts)], source=firsts[place - 1])


def _exchange(memory: Memory, *, to: int, source: int) -> None:
    """Send to a rank and receive from a rank, by the backend."""
    send = dist.P2POp(dist.isend, memory.whole, to, memory.group)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, memory.other, source, memory.group)]):
        work.wait()


def time_calls(
    sides: Mapping[str, Call], *, seconds: float, device: torch.device
) -> dict[str, tuple[list[float], torch.Tensor]]:
    """Time calls in alternating blocks; return for each the mean of each block, and all calls, of the slowest rank.

    Collective over the world.
    """
    trial = []
    for side, call in sides.items():
        timed(side, call, _WARM_UP, device)
        barrier()
        trial.append(timed(side, call, _WARM_UP, device).min().item())
    slowest = [max(each, 1e-9) for each in all_reduce(trial, "max")]
    calls = [min(max(1, int(_BLOCK_SECONDS / each)), _MOST_CALLS) for each in slowest]
    of_round = sum(number * each for number, each in zip(calls, slowest, strict=True))
    rounds = min(max(_FEWEST_ROUNDS, int(seconds / of_round)), _MOST_ROUNDS)
    blocks: dict[str, list[torch.Tensor]] = {side: [] for side in sides}
    order = list(zip(sides, calls, strict=True))
    for _ in range(rounds):
        for side, number in order:
            barrier()
            blocks[side].append(timed(side, sides[side], number, device))
        order.reverse()
    found = {}
    for side, each in blocks.items():
        own = torch.stack(each)
        found[side] = all_reduce(own.mean(dim=1), "max").tolist(), all_reduce(own.flatten(), "max")
    return found


def timed(side: str, call: Call, number: int, device: torch.device) -> torch.Tensor:
    """Return the seconds of so many calls without a pause.

    Raises:
        RankwiseError: A call failed. If it is the backend's, whose errors name no rank, the message has those that are
            dead or do not answer.
    """
    try:
        return (_timed_here if device.type == "cpu" else _timed_there)(call, number, device)
    except RankwiseError:
        raise
    except (MemoryError, RuntimeError) as error:
        problem = f"{side} failed: {summary(error)}"
        try:
            if side != OURS:
                barrier("after an error of the backend")
        except RankwiseError as lost:
            problem += f"; {lost}"
        raise RankwiseError(problem) from error


def _timed_here(call: Call, number: int, _: torch.device) -> torch.Tensor:
    was_enabled = gc.isenabled()
    gc.disable()  # as timeit does: whose garbage is collected in which block is chance
    try:
        moments = [time.perf_counter()]
        for _number in range(number):
            call()
            moments.append(time.perf_counter())
    finally:
        if was_enabled:
            gc.enable()
    return torch.tensor(moments, dtype=torch.float64).diff()


def _timed_there(call: Call, number: int, device: torch.device) -> torch.Tensor:
    """Time calls on an accelerator by its own clock: it may still work when they return."""
    events = [torch.Event(device, enable_timing=True) for _ in range(number + 1)]
    torch.accelerator.synchronize()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.accelerator.synchronize()
    spans = [first.elapsed_time(second) for first, second in itertools.pairwise(events)]
    return torch.tensor(spans, dtype=torch.float64) / 1e3
