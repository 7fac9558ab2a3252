"""A random permutation of the numbers below a length, computed position by position, and not stored.

It is a Feistel network on pairs of numbers: a number is a row and a column of a grid, and each round adds to one of
the two a hash of the other, modulo its size. The grid has hardly more cells than there are numbers; a number that comes
out beyond the length goes through the network again, until it is below.

It is a function of seed, epoch and length alone: integers of 64 bits, the same on every machine.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import torch

# Of a grid whose sides are below 2**31, as 32 bits of a hash times a side have to fit into 63.
LONGEST: Final = 1 << 62
# Few rounds on a small grid prefer some permutations: up to this length, random numbers are sorted instead.
_LONGEST_SORTED: Final = 4096
_ROUNDS: Final = 6
# Odd numbers with bits that look random, below 2**63, as torch takes them.
_MULTIPLIERS: Final = (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51)
_LOW_BITS: Final = (1 << 32) - 1


class Permutation:
    """A permutation of the numbers below `length`; called with a tensor of positions, it returns what is there."""

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        self._length = length
        text = f"{seed} {epoch} {length}".encode()
        digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS, person=b"rankwise order").digest()
        keys = [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, len(digest), 8)]
        # Also where the user's program has another default device.
        self._keys = [torch.tensor(key, device="cpu") for key in keys]
        self._rows = math.isqrt(length - 1) + 1
        self._columns = -(-length // self._rows)
        self._sorted: torch.Tensor | None = None
        if length <= _LONGEST_SORTED:
            numbers = torch.arange(length, device="cpu")
            hashes = _hashed(_hashed(numbers, self._keys[0]), self._keys[1])
            self._sorted = hashes.argsort(stable=True)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        if self._sorted is not None:
            return self._sorted[positions]
        result = self._encrypted(positions)
        while len(beyond := (result >= self._length).nonzero().view(-1)):
            result[beyond] = self._encrypted(result[beyond])
        return result

    def _encrypted(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return where the network takes each number of the grid."""
        size, other_size = self._rows, self._columns
        moved = torch.div(numbers, other_size, rounding_mode="floor")
        other = numbers - moved * other_size
        for key in self._keys:
            moved += _hashed(other, key).mul_(size).bitwise_right_shift_(32)  # the hash, scaled to below `size`
            moved -= (moved >= size) * size
            moved, other, size, other_size = other, moved, other_size, size
        return moved * other_size + other


def _hashed(numbers: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return 32 bits for each number; arithmetic modulo 2**64."""
    first, second = _MULTIPLIERS
    result = torch.add(key, numbers, alpha=first)
    result ^= result >> 29
    return result.mul_(second).bitwise_right_shift_(32).bitwise_and_(_LOW_BITS)
