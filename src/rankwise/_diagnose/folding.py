"""Samples as text: ranks with the same location together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rankwise._diagnose.sampling import ProcessSample, RankSample
from rankwise._text import ranks_on_hosts_text, ranks_text

# A worker of a data loader without work waits there.
_IDLE: Final = "/torch/utils/data/_utils/worker.py"
_SHOWN: Final = 8
_TRACKER: Final = "/multiprocessing/resource_tracker.py"
_FORK_SERVER: Final = "/multiprocessing/forkserver.py"
_FORKED: Final = "_serve_one"  # in what the fork server has forked
_ONE_HOST: Final[Mapping[int, str]] = {}


def summary(samples: Sequence[RankSample]) -> str:
    """Return one line: "ranks 0-2, 4-7: all_reduce at train.py:88 · rank 3: open at data.py:41"."""
    parts = [f"{ranks_text(ranks)}: {location}" for location, ranks in by_location(samples).items()]
    parts += [
        f"{ranks_text([sample.rank])}, worker {worker.pid}: {worker.location}"
        for sample in samples
        for worker in sample.workers
        if is_busy(worker)
    ]
    return " · ".join(parts)


def by_location(samples: Sequence[RankSample]) -> Mapping[str, list[int]]:
    """Return the ranks at each location."""
    ranks: dict[str, list[int]] = {}
    for sample in samples:
        ranks.setdefault(sample.process.location, []).append(sample.rank)
    return ranks


def details(samples: Sequence[RankSample], hosts: Mapping[int, str] = _ONE_HOST) -> str:
    """Return one stack for each location, under a line that names the ranks there, and the given hosts of them."""
    of_rank = {sample.rank: sample for sample in samples}
    blocks = ["Stacks (most recent call first):"]
    for location, ranks in by_location(samples).items():
        pids = ", ".join(str(of_rank[rank].process.pid) for rank in ranks[:_SHOWN])
        pids += ", ..." if len(ranks) > _SHOWN else ""
        who = ranks_on_hosts_text(ranks, hosts)
        blocks.append(f"{who} ({'process' if len(ranks) == 1 else 'processes'} {pids}): {location}")
        blocks.append(_body(of_rank[ranks[0]].process))
    for sample in samples:
        for worker in sample.workers:
            if is_busy(worker):
                blocks.append(f"{ranks_text([sample.rank])}, worker process {worker.pid}: {worker.location}")
                blocks.append(_body(worker))
    return "\n".join(blocks)


def _body(sample: ProcessSample) -> str:
    if sample.stack is not None:
        return str(sample.stack)
    waits = f"waits in {sample.channel}" if sample.channel else "does not wait in the kernel"
    return f"  {sample.reason}\n  state {sample.state}, CPU {sample.cpu_seconds:.1f} s, {waits}"


def is_busy(worker: ProcessSample) -> bool:
    """Return whether a process that a rank has started is more than a worker that waits for work."""
    if worker.stack is None or not worker.stack.frames:
        return worker.state in {"T", "D"}
    files = [frame.file for frame in worker.stack.frames]
    served = [frame.function for frame in worker.stack.frames if _FORK_SERVER in frame.file]
    if any(_TRACKER in file for file in files) or (served and _FORKED not in served):
        return False
    user = worker.stack.user_frame
    return user is not None and not _waits_for_work(files)


def _waits_for_work(files: Sequence[str]) -> bool:
    """Return whether the frames below the loop of a worker are those of its queue."""
    loop = next((index for index, file in enumerate(files) if _IDLE in file), None)
    return loop is not None and all(
        "/multiprocessing/" in file or file.endswith("/selectors.py") for file in files[:loop]
    )
