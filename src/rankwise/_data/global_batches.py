"""GlobalBatches: the batches of all ranks together, of which each rank takes its part.

A place in the order is one number, the position: the samples of all epochs before, and those of this one. It moves with
what was trained on, which the sampler cannot see: the workers of a loader ask for batches long before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Final, Protocol

import torch
from torch.utils.data import Sampler

from rankwise._arguments import as_bool, as_integer, integer
from rankwise._data.permutation import LONGEST, Permutation
from rankwise._session.getters import get_rank, get_world_size
from rankwise._training.random_streams import as_seed, derived_seed, same_seed
from rankwise.errors import InvalidArgumentError, shown

# Indices that are computed at once: enough that the time of one operation of torch does not count.
_MOST_AT_ONCE: Final = 65536
_FIRST_AT_ONCE: Final = 2048
_STATE: Final = ("position", "length", "seed")


class _SizedSampler(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class GlobalBatches(Sampler[list[Any]]):
    """A batch sampler for a DataLoader: each rank gets its part of every global batch, each sample once an epoch.

    Local. The order is a function of seed and epoch alone, whatever the numbers of ranks and of workers are, and takes
    no memory. An epoch begins by itself where the one before has ended: there is no `set_epoch`.

    A global batch is split into contiguous parts, whose sizes differ by one at most; the first ranks have the larger
    ones. In the last batch of an epoch there may be fewer samples than ranks: a rank without a part gets no batch
    there, so that its loader ends one step earlier. `in_step(loader, mode="longest")` gives that rank None in its
    place, `mode="shortest"` leaves that batch out on all ranks, as `drop_last` does; with `pad` there is none.

    `state_dict()` has three numbers, the same on all ranks: the position, counted in samples of all ranks since the
    beginning of epoch 0, the length, and the seed. Iterating over `in_step(loader)` counts; in any other loop, call
    `trained()` after each step, on every rank. An iteration begins at the position: at what has not been trained on.
    If nothing counts, it begins with an epoch: the next one if the last iteration came to its end, else the same again.

    Args:
        length_or_sampler: The length of the dataset; or a sampler of single samples, which has a length, and from which
            all ranks get the same indices: all of an epoch, when it begins. What it draws from the default generators
            of Python, numpy or torch follows from seed and epoch; one that has a generator of its own is in the hands
            of the program after a resume. Its `set_epoch` is called, if it has one.
        batch_size: The number of samples in a global batch, of all ranks together; at least one for each rank.
        seed: The seed of the order, at least 0.
        shuffle: Whether the order is random; if not, samples come in the order of their indices. It has no meaning for
            a sampler, which has an order.
        drop_last: Whether a last batch with fewer than `batch_size` samples is left out.
        pad: Whether such a last batch is filled with samples from the beginning of the epoch, which come twice then.

    Raises:
        InvalidArgumentError: An argument is not as above; `drop_last` leaves nothing, or is there together with `pad`.
            Raised by iterations: there are more ranks than samples in a batch, or a sampler returns another number of
            samples than its length.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from rankwise.data import GlobalBatches, in_step
        >>> sampler = GlobalBatches(10, batch_size=4, shuffle=False)
        >>> list(sampler)  # on 2 ranks, rank 0: [[0, 1], [4, 5], [8]]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        >>> loader = DataLoader(range(10), batch_sampler=sampler)
        >>> for batch in in_step(loader):
        ...     break
        >>> sampler.state_dict()  # in epoch 1, with the batch of the step that was left
        {'position': 14, 'length': 10, 'seed': 0}
    """

    def __init__(
        self,
        length_or_sampler: int | _SizedSampler,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        pad: bool = False,
    ) -> None:
        length = integer(length_or_sampler)
        self._sampler = None if length is not None else _checked_sampler(length_or_sampler)
        self._length = length if length is not None else len(self._sampler or ())
        if not 0 < self._length <= LONGEST:
            raise InvalidArgumentError(f"length_or_sampler={shown(length_or_sampler)} has {self._length} samples")
        self._batch_size = as_integer(batch_size, "batch_size")
        if self._batch_size < 1:
            raise InvalidArgumentError(f"batch_size={shown(batch_size)} is below 1")
        self._seed = as_seed(seed, "seed")
        self._shuffle = as_bool(shuffle, "shuffle")
        self._drop_last, self._pad = as_bool(drop_last, "drop_last"), as_bool(pad, "pad")
        if self._drop_last and self._pad:
            raise InvalidArgumentError("drop_last=True leaves the last batch out, and pad=True fills it: choose one")
        if self._drop_last and self._length < self._batch_size:
            raise InvalidArgumentError(
                f"drop_last=True leaves nothing of {self._length} samples, with batch_size={self._batch_size}"
            )
        self._position = 0
        # An iteration has begun, and nothing of it was counted: the position does not say what was trained on.
        self._uncounted = False
        self._ended_epoch: int | None = None  # the epoch that this rank has last come to the end of

    @property
    def epoch(self) -> int:
        """The epoch in which the next sample is, from 0."""
        return self._start() // self._length

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._length}, {self._batch_size}, seed={self._seed}, shuffle={self._shuffle}, "
            f"drop_last={self._drop_last}, pad={self._pad}; position {self._start()})"
        )

    def __len__(self) -> int:
        """Return how many batches this rank has in a whole epoch; after a resume, the first one has fewer."""
        return self._num_batches(0, get_rank(), get_world_size())

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches_of(get_rank(), get_world_size())

    def trained(self) -> None:
        """Count a global batch as trained on. Local: on every rank, also on one that has no part of the last batch."""
        self._uncounted = False
        epoch, first = divmod(self._position, self._length)
        self._position = self._settled(epoch * self._length + min(first + self._batch_size, self._length))

    def batches_left(self) -> int:
        """Return how many batches this rank still has in the epoch. Local."""
        return self._num_batches(self._start() % self._length, get_rank(), get_world_size())

    def state_dict(self) -> dict[str, int]:
        """Return what was trained on, as three numbers that are the same on all ranks. Local.

        Inside of a loop over `in_step(loader)`, the batch of the step counts already: save after `optimizer.step()`.

        Raises:
            InvalidArgumentError: This rank has begun to iterate, and nothing has counted its steps.
        """
        if self._uncounted:
            raise InvalidArgumentError(
                "the sampler cannot know which of its batches were trained on, as a loader asks for them in advance: "
                "iterate over rankwise.data.in_step(loader), or call sampler.trained() after each step"
            )
        return dict(zip(_STATE, (self._position, self._length, self._seed), strict=True))

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on where a state was saved. Local; the number of ranks, and the batch size, may be others.

        Raises:
            InvalidArgumentError: It is no such state, or one of a dataset of another length, or of another seed.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != set(_STATE):
            raise InvalidArgumentError(f"a state of GlobalBatches has {', '.join(_STATE)}, got {shown(state_dict)}")
        position, length, seed = (as_integer(state_dict[name], name) for name in _STATE)
        if length != self._length:
            raise InvalidArgumentError(
                f"the state is of a dataset with {length} samples, this one has {self._length}: positions in their "
                "orders do not correspond; begin anew, or load the same data"
            )
        if seed != self._seed:
            raise InvalidArgumentError(
                f"the state is of an order with seed={seed}, this one has seed={self._seed}: samples would be repeated "
                f"and left out; pass seed={seed}"
            )
        if position < 0:
            raise InvalidArgumentError(f"position={position} of the state is below 0")
        self._position = self._settled(position)
        self._uncounted, self._ended_epoch = False, None

    def _settled(self, position: int) -> int:
        """Return a position, or the beginning of the next epoch if no batch is left in that of the position."""
        epoch, first = divmod(position, self._length)
        is_over = self._drop_last and self._length - first < self._batch_size
        return (epoch + 1) * self._length if is_over else position

    def _start(self) -> int:
        """Return the position at which the next iteration begins."""
        epoch = self._position // self._length
        return (epoch + 1) * self._length if self._uncounted and epoch == self._ended_epoch else self._position

    def _num_batches(self, first: int, rank: int, world_size: int) -> int:
        """Return how many batches a rank has, from sample `first` of an epoch on."""
        self._require_parts(world_size)
        whole, rest = divmod(self._length - first, self._batch_size)
        return whole + (rest > 0 and not self._drop_last and _part(self._last_size(rest), rank, world_size)[1] > 0)

    def _last_size(self, rest: int) -> int:
        return self._batch_size if self._pad else rest

    def _require_parts(self, world_size: int) -> None:
        if self._batch_size < world_size:
            raise InvalidArgumentError(
                f"batch_size={self._batch_size} is that of all ranks together, and there are {world_size} ranks: "
                f"pass at least {world_size}"
            )

    def _batches_of(self, rank: int, world_size: int) -> Iterator[list[Any]]:
        """Yield the batches of a rank, to the end of the epoch."""
        epoch, first = divmod(self._start(), self._length)
        if epoch == self._ended_epoch and not self._num_batches(first, rank, world_size):
            epoch, first = epoch + 1, 0  # the rest was a batch without a part for this rank, for which nothing counted
        self._require_parts(world_size)
        self._position, self._uncounted, self._ended_epoch = epoch * self._length + first, True, None
        order = self._order(epoch)
        whole, rest = divmod(self._length - first, self._batch_size)
        begin, size = _part(self._batch_size, rank, world_size)
        numbers = torch.arange(size, device="cpu")
        done, at_once = 0, max(1, _FIRST_AT_ONCE // size)
        while done < whole:
            count = min(at_once, whole - done)
            starts = torch.arange(done, done + count, device="cpu") * self._batch_size + (first + begin)
            yield from order(starts[:, None] + numbers)
            done, at_once = done + count, max(1, min(2 * at_once, _MOST_AT_ONCE // size))
        begin, size = _part(self._last_size(rest), rank, world_size)
        if rest and size and not self._drop_last:
            begin += first + whole * self._batch_size
            yield from order((torch.arange(begin, begin + size, device="cpu") % self._length)[None])
        self._ended_epoch = epoch

    def _order(self, epoch: int) -> Callable[[torch.Tensor], Iterable[list[Any]]]:
        """Return a function that returns the samples at some positions of an epoch, row by row."""
        if self._sampler is not None:
            samples = self._samples_of(self._sampler, epoch)
            return lambda positions: ([samples[position] for position in row] for row in positions.tolist())
        if not self._shuffle:
            return lambda positions: map(torch.Tensor.tolist, positions)
        permutation = Permutation(self._length, seed=self._seed, epoch=epoch)
        return lambda positions: map(torch.Tensor.tolist, permutation(positions.reshape(-1)).view_as(positions))

    def _samples_of(self, sampler: _SizedSampler, epoch: int) -> list[Any]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with same_seed(derived_seed(f"epoch {epoch} of {self._seed}")):
            samples = list(sampler)
        if len(samples) != self._length:
            raise InvalidArgumentError(
                f"the sampler {shown(sampler)} returned {len(samples)} samples, and had {self._length} before"
            )
        return samples


def _part(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where the part of a rank begins in a global batch, and its size.

    Example:
        >>> [_part(10, rank, 4) for rank in range(4)]
        [(0, 3), (3, 3), (6, 2), (8, 2)]
    """
    least, more = divmod(size, world_size)
    return rank * least + min(rank, more), least + (rank < more)


def _checked_sampler(sampler: Any) -> _SizedSampler:  # noqa: ANN401 - an argument of the user
    if isinstance(sampler, Sized) and hasattr(sampler, "__iter__") and not isinstance(sampler, (str, bytes, Mapping)):
        return sampler  # type: ignore[return-value]  # it has both methods
    raise InvalidArgumentError(
        f"length_or_sampler={shown(sampler)} is neither a length, such as len(dataset), nor a sampler with a length"
    )
