"""The memory that a call takes at most on ranks of one host: for `benchmarks/objects.py`.

A thread of the launcher samples the proportional set sizes of all ranks: a thread of a rank would have to wait while a
pickle is read, and a child of it would share its pages. Pages that several ranks have mapped count in equal parts for
each; those of a file that no rank has mapped do not count, so the call should also read what it returns.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rankwise as rw

# Between two rounds through all ranks.
PAUSE = 0.002

# The bytes of each process, by its id.
Sizes = dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a rank knows about its own memory.

    Attributes:
        pid: The process of the rank.
        before: Its bytes before the call.
        start: When it began the call, on the clock that all processes of the host share.
        end: When all ranks had ended the call, on the same clock.
        after: Its bytes then.
    """

    pid: int
    before: int
    start: float
    end: float
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The bytes that a call takes at most, beyond those before it: on one rank, and on all ranks together."""

    of_a_rank: int
    of_all: int


def proportional_size(pid: int) -> int:
    """Return the proportional set size of a process, in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):  # Pss:     12345 kB
            return int(line.split()[1]) << 10
    return 0


def usage_of(call: Callable[[], object], folder: Path) -> Usage:
    """Collective. Return the memory of this rank around a call, whose result it keeps until all have been measured."""
    pid = os.getpid()
    (folder / str(pid)).touch()
    rw.barrier()
    before = proportional_size(pid)
    rw.barrier()
    start = time.perf_counter()
    result = call()
    rw.barrier()
    end = time.perf_counter()
    after = proportional_size(pid)
    rw.barrier()
    del result
    return Usage(pid=pid, before=before, start=start, end=end, after=after)


def peak_of(program: Callable[..., Usage], *arguments: object, nproc: int) -> Peak:
    """Run a program, which gets the arguments and a folder for `usage_of`, in new ranks, and return their peaks."""
    samples: list[tuple[float, Sizes]] = []
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        sampler = threading.Thread(target=_sample, args=(Path(folder), samples, over))
        sampler.start()
        try:
            usages = rw.launch(program, *arguments, Path(folder), nproc=nproc)
        finally:
            over.set()
            sampler.join()
    during = [sizes for moment, sizes in samples if usages[0].start <= moment <= usages[0].end]
    during.append({usage.pid: usage.after for usage in usages})
    extra = [{usage.pid: sizes.get(usage.pid, 0) - usage.before for usage in usages} for sizes in during]
    return Peak(
        of_a_rank=max(0, *(max(sizes.values()) for sizes in extra)),
        of_all=max(0, *(sum(sizes.values()) for sizes in extra)),
    )


def _sample(folder: Path, samples: list[tuple[float, Sizes]], over: threading.Event) -> None:
    """Sample the processes that have left their id in the folder, until it is over."""
    while not over.wait(PAUSE):
        sizes = {}
        for file in folder.iterdir():
            try:
                sizes[int(file.name)] = proportional_size(int(file.name))
            except OSError:  # the process has ended
                continue
        samples.append((time.perf_counter(), sizes))
