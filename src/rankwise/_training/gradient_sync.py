"""One synchronization of gradients: agreement of the ranks, and the reduction of their buckets.

Ranks compare the digest of their layouts, and combine some bits: a rank may have no buckets for these parameters yet,
or have parameters of which only some are in buckets of another call. Then all ranks do as that rank has to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.control.transports import Completion
from rankwise._comm.reduce_ops import Op
from rankwise._text import ranks_text
from rankwise._torch_xla import DEVICE_TYPE
from rankwise._training.gradient_averaging import SPARSE, combine_bits, layout_bit, reduce_by_copies, reduce_sparse
from rankwise._training.gradient_buckets import Bucket
from rankwise._training.gradient_layout import CollectedGradients, GradientLayout, layout_of, layouts_of
from rankwise.errors import CollectiveError

# Bits of a rank, combined with OR over all ranks.
_NEW_LAYOUT: Final = 1  # it has no buckets for these parameters, or a gradient is sparse that has a place in one
_MISSING: Final = 2  # a gradient is missing
_COPIES: Final = 4  # some of the parameters are in buckets with others

_MOST_NAMES: Final = 5


@dataclass(slots=True)
class GradientSync:
    """One call of `sync_grads`.

    Attributes:
        comm: The group.
        op: The reduction, a sum or a mean.
        bucket_bytes: The size of a bucket.
        needs_all: Whether a missing gradient is an error.
        parameters: The parameters with gradients, each once.
        names: Returns their names.
    """

    comm: Comm
    op: Op
    bucket_bytes: float
    needs_all: bool
    parameters: list[torch.Tensor]
    names: Callable[[], Sequence[str]]

    def exchange(self, call: Call) -> Completion[None]:
        """Agree on the call and reduce the gradients, in a block of `collective`; return a function for the rest.

        That function makes buckets, if there are none yet. It is called after the block, on all ranks.
        """
        layout = self._layout()
        call.content, call.parts = layout.digest, layout.descriptions
        if any(parameter.device.type == DEVICE_TYPE for parameter in self.parameters[:1]):
            return reduce_by_copies(self.comm, call, self.parameters, self.op)
        found = layout.collect(self.parameters) if layout.attached else None
        if found is None and layout.attached:
            layout.dissolve()
            layout = GradientLayout(self.parameters, self.names(), self.bucket_bytes)
            call.content, call.parts = layout.digest, layout.descriptions
        missing = self._missing() if found is None else found.missing
        bits = _MISSING if missing else 0
        bits |= _NEW_LAYOUT if found is None or found.sparse else 0
        bits |= _COPIES if found is None and self._shares_buckets() else 0
        moves = [] if found is None else [bucket.prepare(self.comm, self.op) for bucket in layout.buckets]
        (combined,) = combine_bits(self.comm, call, [bits])()
        if combined & _MISSING and self.needs_all:
            self._raise_missing(call, layout, missing)
        if not self.parameters:
            return _do_nothing
        if combined & _COPIES:
            call.begin_data()
            return reduce_by_copies(self.comm, call, self.parameters, self.op)
        if found is None or combined & _NEW_LAYOUT:
            call.begin_data()
            kinds = [layout_bit(parameter) for parameter in self.parameters]
            kinds = [kind | (SPARSE if index in layout.sparse else 0) for index, kind in enumerate(kinds)]
            return functools.partial(self._build, layout, combine_bits(self.comm, call, kinds)())
        for move in moves:
            move()
        return functools.partial(self._finish, layout, found, some_missing=bool(combined & _MISSING))

    def _layout(self) -> GradientLayout:
        """Return the layout of the parameters, which is new if they have none."""
        found = layout_of(self.parameters[0]) if self.parameters else None
        if found is not None and found.matches(self.parameters, self.bucket_bytes):
            return found
        return GradientLayout(self.parameters, self.names(), self.bucket_bytes)

    def _missing(self) -> list[int]:
        return [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]

    def _shares_buckets(self) -> bool:
        """Return whether some of the parameters are in buckets with others, which must keep their places."""
        own = set(map(id, self.parameters))
        return any(
            other.requires_grad and id(other) not in own
            for layout in layouts_of(self.parameters)
            for other in layout.parameters()
        )

    def _build(self, layout: GradientLayout, kinds: Sequence[int]) -> None:
        """Make buckets on all ranks, and reduce them. Collective over the members."""
        for other in [layout, *layouts_of(self.parameters)]:
            other.dissolve()
        for plan in layout.plan(self.parameters, [index for index, kind in enumerate(kinds) if kind & SPARSE]):
            # A block that exchanges nothing: an error in it is raised on all ranks, in what they call next.
            with self.comm.collective(Call("sync_grads", {"step": "buckets"}, is_data=True)):
                layout.add(Bucket(plan), self.parameters)
        layout.attach(self.parameters)
        call = Call("sync_grads", {"step": "the first reduction"}, is_data=True)
        with self.comm.collective(call):
            found = layout.collect(self.parameters)
            if found is None:
                raise CollectiveError("the parameters have changed during sync_grads, as by another thread")
            moves = [bucket.prepare(self.comm, self.op) for bucket in layout.buckets]
            self.comm.verify(call)
            for move in moves:
                move()
        self._finish(layout, found, some_missing=True)

    def _finish(self, layout: GradientLayout, found: CollectedGradients, *, some_missing: bool) -> None:
        """Give the parameters their reduced gradients. Collective over the members if there are sparse ones."""
        layout.put_back(self.parameters, found, some_missing=some_missing)
        reduce_sparse(self.comm, [self.parameters[index] for index in sorted(layout.sparse)], self.op)

    def _raise_missing(self, call: Call, layout: GradientLayout, missing: Sequence[int]) -> None:
        """Raise, on all ranks, which gradients are missing on which ranks."""
        call.begin_data()
        own = bytes(index in set(missing) for index in range(len(self.parameters)))
        found = self.comm.all_gather_bytes(call, own)
        call.agreement_failed = True  # all members raise the same
        texts = []
        for index, name in enumerate(layout.names):
            ranks = [rank for rank, of_rank in zip(self.comm.ranks, found, strict=True) if of_rank[index]]
            if ranks:
                texts.append(f"{name} on {ranks_text(ranks)}")
        more = f", and of {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
        raise CollectiveError(
            f"missing='error', and there is no gradient of {', '.join(texts[:_MOST_NAMES])}{more}: use the parameter "
            "in the loss on every rank, or pass missing='zeros'"
        )


def _do_nothing() -> None:
    """Finish a synchronization without parameters."""
