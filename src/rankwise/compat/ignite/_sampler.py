"""Any sampler, shared out among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from rankwise.compat.ignite._queries import get_rank, get_world_size
from rankwise.errors import InvalidArgumentError, PayloadTypeError


class DistributedProxySampler(DistributedSampler[Any]):
    """Gives every rank its share of what another sampler draws.

    The sampler draws the same on all ranks, by torch's random state seeded with the epoch (`set_epoch`); after it, that
    state is what it was before. All ranks get equally many: what is missing is drawn again.

    Args:
        sampler: What to share out; it has a length.
        num_replicas: Among how many ranks; by default as many as there are.
        rank: Whose share this is; by default this one's.

    Raises:
        PayloadTypeError: It is no sampler, or has no length, or shares out by itself.

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
                f"Argument sampler should have length, to be shared out; a {type(sampler).__qualname__} has none"
            )
        replicas = get_world_size() if num_replicas is None else num_replicas
        number = get_rank() if rank is None else rank
        super().__init__(sampler, num_replicas=replicas, rank=number, shuffle=False)  # type: ignore[arg-type]  # torch asks for a dataset, and wants its length
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        """Return this rank's share of one epoch."""
        drawn = self._draw()
        return iter(drawn[self.rank : self.total_size : self.num_replicas])

    def _draw(self) -> list[Any]:
        """Return what the sampler draws in this epoch, the same on all ranks."""
        state = torch.random.get_rng_state()
        # The CPU's generator alone: samplers draw from no other, and no other is disturbed.
        torch.default_generator.manual_seed(self.epoch)
        try:
            drawn: list[Any] = []
            while len(drawn) < self.total_size:
                more = list(self.sampler)
                if not more:
                    raise InvalidArgumentError(
                        f"a {type(self.sampler).__qualname__} has a length of {self.total_size} shared out, and draws "
                        "nothing"
                    )
                drawn += more
        finally:
            torch.random.set_rng_state(state)
        return drawn
