"""A sampler that divides the indices of another sampler among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from rankwise.compat.ignite._queries import get_rank, get_world_size
from rankwise.errors import InvalidArgumentError, PayloadTypeError


class DistributedProxySampler(DistributedSampler[Any]):
    """Gives every rank its share of the indices that another sampler draws.

    The sampler draws the same indices on all ranks, since torch's random generator is seeded with the epoch
    (`set_epoch`), and restored afterwards. All ranks get the same number of indices; further ones are drawn if the
    length does not divide.

    Args:
        sampler: The sampler to divide; it has a length.
        num_replicas: The number of ranks that share the indices; by default the world size.
        rank: The rank whose share this is; by default this process's.

    Raises:
        PayloadTypeError: The sampler is not one, has no length, or is distributed already.

    Example:
        >>> list(DistributedProxySampler(torch.utils.data.SequentialSampler("abcde"), num_replicas=2, rank=1))
        [1, 3, 0]
    """

    def __init__(self, sampler: Sampler[Any], num_replicas: int | None = None, rank: int | None = None) -> None:
        if not isinstance(sampler, Sampler):
            raise PayloadTypeError(f"Argument sampler should be instance of torch Sampler, but given: {type(sampler)}")
        if isinstance(sampler, DistributedSampler):
            raise PayloadTypeError("Argument sampler must not be a distributed sampler already")
        if not hasattr(sampler, "__len__"):
            raise PayloadTypeError(
                f"Argument sampler should have length, for ranks to share; a {type(sampler).__qualname__} has none"
            )
        replicas = get_world_size() if num_replicas is None else num_replicas
        number = get_rank() if rank is None else rank
        super().__init__(sampler, num_replicas=replicas, rank=number, shuffle=False)  # type: ignore[arg-type]  # declared for a dataset, of which torch uses the length
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        """Return this rank's share of one epoch."""
        drawn = self._draw()
        return iter(drawn[self.rank : self.total_size : self.num_replicas])

    def _draw(self) -> list[Any]:
        """Return the indices that the sampler draws in this epoch, the same on all ranks."""
        state = torch.random.get_rng_state()
        # Only the CPU's generator: samplers use no other, and the others keep their state.
        torch.default_generator.manual_seed(self.epoch)
        try:
            drawn: list[Any] = []
            while len(drawn) < self.total_size:
                more = list(self.sampler)
                if not more:
                    raise InvalidArgumentError(
                        f"a {type(self.sampler).__qualname__} draws nothing, but {self.total_size} indices are needed"
                    )
                drawn += more
        finally:
            torch.random.set_rng_state(state)
        return drawn
