"""A rank whose number is an argument of init() starts workers of loaders: what do they read, and what do they draw?

loaders.py RANK WORLD_SIZE PORT START_METHOD...

Prints for each start method the elements of an IterableDataset, the numbers that workers draw, and the indices.
"""

import json
import random
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import rankwise as rw


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(rw.data.shard(range(10)))


class Draws(Dataset[tuple[int, list[float]]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        drawn = [torch.rand(1).item(), float(np.random.rand()), random.random()]  # noqa: NPY002, S311
        state = torch.get_rng_state()
        rw.seed(7)
        drawn.append(torch.rand(1).item())
        torch.set_rng_state(state)
        return index, drawn


def as_it_is(batch: object) -> object:
    return batch


if __name__ == "__main__":
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    found = {}
    address = f"127.0.0.1:{sys.argv[3]}"
    with rw.init(rank=rank, world_size=size, local_rank=rank, local_world_size=size, address=address):
        for method in sys.argv[4:]:
            rw.seed(0)
            how = {"num_workers": 2, "multiprocessing_context": method, "collate_fn": as_it_is}
            numbers = [number for batch in DataLoader(Numbers(), batch_size=4, **how) for number in batch]  # type: ignore[arg-type]
            sampler = rw.data.GlobalBatches(8, 4, seed=1)
            draws = [one for batch in DataLoader(Draws(), batch_sampler=sampler, **how) for one in batch]  # type: ignore[arg-type]
            found[method] = (numbers, [drawn for _, drawn in draws], [index for index, _ in draws])
    print(json.dumps(found))
