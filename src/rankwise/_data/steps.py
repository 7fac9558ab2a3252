"""Loops over data in which all ranks make the same number of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final, Literal, TypeVar, overload

import torch
from torch.utils.data import IterableDataset

from rankwise._collectives.groups import comm_of
from rankwise._collectives.reduce import all_reduce
from rankwise._comm.comm import Comm
from rankwise._data.global_batches import GlobalBatches
from rankwise._training.random_streams import derived_seed
from rankwise.errors import CollectiveError, InvalidArgumentError, shown

T = TypeVar("T")

# How many steps all ranks make, by mode, from the steps of each; and the same for whether there is a next one.
_LENGTHS: Final[dict[str, Callable[[Iterable[int]], int]]] = {"shortest": min, "longest": max}
_FLAGS: Final[dict[str, Literal["and", "or"]]] = {"shortest": "and", "longest": "or"}
_END: Final = object()


@overload
def in_step(loader: Iterable[T], *, mode: Literal["shortest"] = ...) -> Iterator[T]: ...
@overload
def in_step(loader: Iterable[T], *, mode: str) -> Iterator[T | None]: ...
def in_step(loader: Iterable[T], *, mode: str = "shortest") -> Iterator[T | None]:
    """Iterate over a loader so that all ranks make the same number of steps.

    Collective over the session: at the beginning of the loop the ranks exchange how many steps each has. Where all know
    it, no message follows. Otherwise, as for an IterableDataset, each step makes a small all_reduce, and an error of a
    loader is raised on all ranks.

    If the batch sampler of the loader is `GlobalBatches`, each step counts as trained on from the moment at which its
    batch is handed out: what `state_dict()` says in the body of the loop is right after `optimizer.step()`, also for a
    `break` there. All ranks have to be at the same position. The seed of the loader's workers is then derived from the
    seed of this rank and the position, and takes no number from its stream: a run that goes on in the middle of an
    epoch draws the numbers of one that was not stopped. Its workers begin other numbers there. A `generator` of the
    loader is used as torch does.

    Args:
        loader: A DataLoader, or any iterable.
        mode: "shortest": the loop ends where the first rank has no more data, and what others still have is left out.
            "longest": it ends where no rank has more; a rank whose data has ended before gets None in its place, and
            still takes part in the collectives of the step.

    Raises:
        InvalidArgumentError: `mode` is another one, or the loader is not an iterable.
        RemoteRankError: Another rank failed to begin, or its loader raised, where each step has a message.
        MismatchError: The modes differ, or the positions of `GlobalBatches`; or another rank calls another collective.
        CollectiveError: A loader has ended before its length; or a rank is dead, or did not call within the session's
            timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> data = range(3 + rankwise.get_rank())
        >>> list(rankwise.data.in_step(data))  # on 2 ranks: [0, 1, 2]
        [0, 1, 2]
        >>> list(rankwise.data.in_step(data, mode="longest"))  # on 2 ranks, rank 0: [0, 1, 2, None]
        [0, 1, 2]
    """
    comm = comm_of(None)
    sampler = _sampler_of(loader)
    own, lengths = _agreed_lengths(comm, loader, sampler, mode)
    if min(lengths) < 0:
        yield from _with_flags(comm, loader, _FLAGS[mode])
        return
    # A loader without steps is not touched: its sampler would take an iteration for that of the next epoch.
    batches = _begun(loader, sampler) if own else iter(())
    num_steps = _LENGTHS[mode](lengths)
    for step in range(num_steps):
        batch: Any = next(batches, _END) if step < own else None
        if batch is _END:
            raise CollectiveError(f"the loader has ended after {step} steps on this rank, and its length was {own}")
        if sampler is not None:
            sampler.trained()
        yield batch
    if sampler is not None and num_steps < max(lengths):
        sampler.trained()  # the last batch, which is left out


def _sampler_of(loader: object) -> GlobalBatches | None:
    sampler = loader if isinstance(loader, GlobalBatches) else getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, GlobalBatches) else None


def _begun(loader: Iterable[T], sampler: GlobalBatches | None) -> Iterator[T]:
    """Return an iterator over a loader, of which one with a sampler that can be resumed draws no number of this rank.

    A DataLoader draws a seed for its workers when it begins: a resumed run does so once more, also without workers.
    """
    if sampler is None:
        return iter(loader)
    generator = torch.default_generator
    with torch.random.fork_rng(devices=[]):  # of the CPU alone: no device is touched
        generator.manual_seed(derived_seed(f"workers of {generator.initial_seed()} for {sampler!r}"))
        return iter(loader)


def _agreed_lengths(comm: Comm, loader: object, sampler: GlobalBatches | None, mode: str) -> tuple[int, list[int]]:
    """Return how many steps this rank has, and how many each rank has; -1 where it is not known. Collective."""
    with comm.call("in_step") as call:
        if not isinstance(mode, str) or mode not in _LENGTHS:
            raise InvalidArgumentError(f"mode={shown(mode)} is not one of {', '.join(_LENGTHS)}")
        if not isinstance(loader, Iterable):
            raise InvalidArgumentError(f"in_step takes a DataLoader or another iterable, got {shown(loader)}")
        call.settings = {"mode": mode, "sampler": repr(sampler)}
        own = sampler.batches_left() if sampler is not None else _length(loader)
        return own, [int(length) for length in call.all_gather(b"%d" % own)]


def _length(loader: Iterable[object]) -> int:
    """Return the length of a loader, or -1 if it has none; what an IterableDataset says of itself may be wrong."""
    if not isinstance(loader, Sized) or isinstance(getattr(loader, "dataset", None), IterableDataset):
        return -1
    return len(loader)


def _with_flags(comm: Comm, loader: Iterable[T], op: Literal["and", "or"]) -> Iterator[T | None]:
    """Iterate while all, or any, of the ranks have a next batch."""
    batches: Iterator[T] | None = None
    batch: Any = None
    while True:
        try:
            if batch is not _END:
                batches = iter(loader) if batches is None else batches
                batch = next(batches, _END)
        except Exception:
            with comm.call("in_step"):
                raise
        if not all_reduce(batch is not _END, op=op):
            return
        yield None if batch is _END else batch
