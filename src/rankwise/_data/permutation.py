"""A random permutation of the numbers below a length, computed position by position, and not stored.

It is a Feistel network on pairs of numbers: a number is a row and a column of a grid, and each round adds to one of
the two a hash of the other, modulo its size. The grid has hardly more cells than there are numbers; a number that comes
out beyond the length goes through the network again, until it is below.

It is a function of seed, epoch and length alone, the same on every machine: integers of 32 bits where all numbers fit,
since an operation on these takes a third of the time, else of 64 bits.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch

# Of a grid whose sides are below 2**31, as half of the bits of a hash times a side have to fit into an integer.
LONGEST: Final = 1 << 62
_LONGEST_OF_32_BITS: Final = 1 << 30
# Few rounds on a small grid prefer some permutations: up to this length, random numbers are sorted instead.
_LONGEST_SORTED: Final = 4096
_ROUNDS: Final = 6
# Odd numbers with bits that look random, and by how much a hash is shifted between the two products.
_MULTIPLIERS: Final = {
    torch.int32: (0x2C1B3C6D, 0x297A2D39, 15),
    torch.int64: (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51, 29),
}


class Permutation:
    """A permutation of the numbers below `length`; called with a tensor of positions, it returns what is there."""

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        self._length = length
        self._dtype = torch.int32 if length <= _LONGEST_OF_32_BITS else torch.int64
        size = self._dtype.itemsize
        text = f"{seed} {epoch} {length}".encode()
        digest = hashlib.blake2b(text, digest_size=size * _ROUNDS, person=b"rankwise order").digest()
        keys = [int.from_bytes(digest[at : at + size], "little", signed=True) for at in range(0, len(digest), size)]
        # Also where the user's program has another default device.
        self._keys = [torch.tensor(key, dtype=self._dtype, device="cpu") for key in keys]
        self._column_bits = (length - 1).bit_length() // 2
        self._rows = -(-length >> self._column_bits)
        self._sorted: torch.Tensor | None = None
        if length <= _LONGEST_SORTED:
            numbers = torch.arange(length, dtype=self._dtype, device="cpu")
            self._sorted = _hashed(_hashed(numbers, self._keys[0]), self._keys[1]).argsort(stable=True)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        if self._sorted is not None:
            return self._sorted[positions]
        result = self._encrypted(positions.to(self._dtype))
        while len(beyond := (result >= self._length).nonzero().view(-1)):
            result[beyond] = self._encrypted(result[beyond])
        return result

    def _encrypted(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return where the network takes each number of the grid."""
        bits, mask = self._column_bits, (1 << self._column_bits) - 1
        half = 4 * self._dtype.itemsize  # of the bits of a number
        rows, columns = numbers >> bits, numbers & mask
        for row_key, column_key in zip(self._keys[::2], self._keys[1::2], strict=True):
            # The upper half of the hash without its sign, scaled to below the number of rows.
            moved = _hashed(columns, row_key).bitwise_right_shift_(half).bitwise_and_((1 << (half - 1)) - 1)
            rows += moved.mul_(self._rows).bitwise_right_shift_(half - 1)
            rows -= self._rows
            rows += (rows >> (2 * half - 1)).bitwise_and_(self._rows)  # where it is below 0
            columns += _hashed(rows, column_key).bitwise_right_shift_(half)
            columns &= mask
        return (rows << bits).bitwise_or_(columns)


def _hashed(numbers: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a number for each number, whose upper half looks random; arithmetic modulo 2**32, or 2**64."""
    first, second, shift = _MULTIPLIERS[numbers.dtype]
    result = torch.add(key, numbers, alpha=first)
    result ^= result >> shift
    return result.mul_(second)
