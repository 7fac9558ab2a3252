"""The last rank is killed in a loop whose length nobody knows; the others print the error that this is to them."""

import os
import signal
from collections.abc import Iterator

import torch

import rankwise as rw

torch.set_num_threads(1)


def lines() -> Iterator[int]:
    yield from range(2)
    if rw.get_rank() == rw.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    yield 2


seen = []
try:
    with rw.init(timeout=280):
        for line in rw.data.in_step(lines()):
            seen.append(line)  # noqa: PERF402 - what came before the error
except rw.CollectiveError as error:
    print(type(error).__name__, seen, error)
