"""Metrics: sums and counts on each rank, and their means over all ranks in one agreement."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from numbers import Real
from typing import Any, Final

import torch

from rankwise._collectives.all_gather import all_gather
from rankwise._collectives.groups import comm_of
from rankwise._restricted_pickles import plain_loads
from rankwise.errors import InvalidArgumentError, shown

# Devices without float64.
_NARROW: Final = frozenset({"mps", "xla"})


class Metrics:
    """Sums and counts by name, whose means are over the samples of all ranks, and not over ranks.

    Example:
        >>> log = Metrics()
        >>> log.add(loss=(6.0, 4), lr=0.1)  # the sum of 4 samples, and a single value
        >>> log.add(loss=(1.0, 1), lr=0.3)
        >>> log.compute()
        {'loss': 1.4, 'lr': 0.2}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, Any] = {}

    def add(self, **values: Any) -> None:  # noqa: ANN401 - numbers of any kind
        """Add values, by name.

        Local. A tensor is added on its device, without waiting for it.

        Args:
            **values: A number, which counts once; or a pair of a sum and the number of samples in it, at least 0.
                Numbers are Python's, numpy's, or tensors of one element.

        Raises:
            InvalidArgumentError: A value is not as above. Nothing is added.
        """
        pairs = {name: value if isinstance(value, tuple) else (value, 1) for name, value in values.items()}
        checked = {name: _checked(name, pair) for name, pair in pairs.items()}
        for name, (total, count) in checked.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._counts[name] = self._counts.get(name, 0) + count

    def compute(self) -> dict[str, float]:
        """Return the mean of each name over all that was added on all ranks, and begin anew.

        Collective over the session. Ranks may have other names, or none. The result is the same on all of them, with
        the names in their order; the mean of a count of 0 is not a number.

        Raises:
            RemoteRankError: A value cannot be read on another rank, as after an error of its device.
            MismatchError: Another rank calls another collective.
            CollectiveError: A rank is dead, or did not call within the session's timeout.
            NotJoinedError: The world has more than one rank, and this process has not joined it.
        """
        try:
            own = {name: (float(total), float(self._counts[name])) for name, total in self._sums.items()}
        except Exception as error:
            with comm_of(None).call("Metrics.compute"):  # raises it on the other ranks
                raise error from None
        of_ranks: list[Mapping[str, tuple[float, float]]] = list(map(plain_loads, all_gather(pickle.dumps(own))))
        self._sums, self._counts = {}, {}
        names = sorted({name for found in of_ranks for name in found})
        return {name: _mean([found[name] for found in of_ranks if name in found]) for name in names}


def _mean(pairs: list[tuple[float, float]]) -> float:
    count = sum(count for _, count in pairs)
    # Not fsum, which raises where sums are infinite.
    return sum(total for total, _ in pairs) / count if count else math.nan


def _checked(name: str, pair: tuple[Any, ...]) -> tuple[Any, Any]:
    if len(pair) != 2:
        raise InvalidArgumentError(f"{name}={shown(pair)} is neither a number nor a pair of a sum and a count")
    total, count = (_number(name, value) for value in pair)
    if not isinstance(count, torch.Tensor) and not 0 <= count < math.inf:
        raise InvalidArgumentError(f"{name}: the count {shown(count)} is not a number of at least 0")
    return total, count


def _number(name: str, value: Any) -> Any:  # noqa: ANN401
    """Return a Python number, or a tensor without dimensions that sums are exact in."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        wide = torch.float32 if value.device.type in _NARROW else torch.float64
        return value.detach().reshape(()).to(wide)
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise InvalidArgumentError(f"{name}={shown(value)} is not a number, nor a tensor of one element")
