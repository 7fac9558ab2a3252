"""Datasets for tests."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Numbers(Dataset[int]):
    """The numbers below a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index >= self.length:  # the end of the old protocol of iteration
            raise IndexError(index)
        return index


class Noise(Numbers):
    """A random number for each sample."""

    def __getitem__(self, index: int) -> float:  # type: ignore[override]  # another kind of samples
        return torch.rand(1, dtype=torch.float64).item()
