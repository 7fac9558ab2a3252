"""One synchronization of gradients: agreement of the ranks, and the reduction of their buckets.

Ranks compare the digest of their layouts, and combine some bits: a rank may have no buckets for these parameters yet,
or have parameters of which only some are in buckets of another call. Then all ranks do as that rank has to.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import torch

from rankwise._collectives.tensor_sharing import shared_tensor
from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.control.transports import Completion
from rankwise._comm.reduce_ops import Op
from rankwise._text import ranks_text
from rankwise._training.gradient_averaging import SPARSE, combine_bits, layout_bit, reduce_by_copies, reduce_sparse
from rankwise._training.gradient_buckets import Bucket
from rankwise._training.gradient_layout import GradientLayout, layout_of, layouts_of
from rankwise._training.gradient_moves import CollectedGradients
from rankwise._training.gradient_overlap import GradientOverlap, open_bucket_group
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import CollectiveError, RankwiseError

# Bits of a rank, combined with OR over all ranks.
_NEW_LAYOUT: Final = 1  # it has no buckets for these parameters, or a gradient is sparse that has a place in one
_MISSING: Final = 2  # a gradient is missing
_COPIES: Final = 4  # some of the parameters are in buckets with others
_STARTED: Final = 8  # it has started to reduce buckets during backward
_LOST: Final = 16  # it cannot reduce buckets during backward

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
        overlap: Whether buckets are reduced during backward.
    """

    comm: Comm
    op: Op
    bucket_bytes: float
    needs_all: bool
    parameters: list[torch.Tensor]
    names: Callable[[], Sequence[str]]
    overlap: bool
    _running: list[tuple[GradientLayout, GradientOverlap, CollectedGradients]] = field(default_factory=list)

    def exchange(self, call: Call) -> Completion[None]:
        """Agree on the call and reduce the gradients, in a block of `collective`; return a function for the rest.

        That function makes buckets, if there are none yet. It is called after the block, on all ranks.
        """
        if self.parameters and self.parameters[0].device.type == DEVICE_TYPE:
            layout = self._new_layout(call)
            raise_missing = functools.partial(self._raise_missing, call, layout, self._missing())
            return reduce_by_copies(
                self.comm, call, self.parameters, self.op, raise_missing=raise_missing if self.needs_all else None
            )
        layout, found = self._collected(call)
        missing = self._missing() if found is None else found.missing
        is_reduced_here = found is not None and layout.overlap is None
        moves = [bucket.prepare(self.comm, self.op) for bucket in layout.buckets if is_reduced_here]
        combined = self._agree(call, layout, found, missing)
        if not self.parameters:
            return _do_nothing
        if combined & _COPIES:
            call.begin_data()
            return reduce_by_copies(self.comm, call, self.parameters, self.op)
        if found is None or combined & _NEW_LAYOUT:
            call.begin_data()
            kinds = [layout_bit(parameter) for parameter in self.parameters]
            kinds = [kind | (SPARSE if index in layout.sparse else 0) for index, kind in enumerate(kinds)]
            is_lost = bool(combined & _LOST)
            return functools.partial(self._build, layout, combine_bits(self.comm, call, kinds)(), is_lost=is_lost)
        for move in moves:
            move()
        return functools.partial(self._finish, layout, found, some_missing=bool(combined & _MISSING))

    def _collected(self, call: Call) -> tuple[GradientLayout, CollectedGradients | None]:
        """Return the layout, and the gradients in its buckets; None if it is new."""
        layout = layout_of(self.parameters[0]) if self.parameters else None
        if layout is not None and layout.matches(self.parameters, self.bucket_bytes):
            call.content, call.parts = layout.digest, layout.descriptions
            found = layout.collect(self.parameters)
            if found is not None:
                self._keep_running(layout, found)
                return layout, found
            layout.dissolve()
        for other in layouts_of(self.parameters):
            parameters = other.parameters()
            if other.overlap is None or len(parameters) != len(other.names):
                continue
            if (gradients := other.collect(parameters)) is not None:
                self._keep_running(other, gradients)
        return self._new_layout(call), None

    def _new_layout(self, call: Call) -> GradientLayout:
        layout = GradientLayout(self.parameters, self.names(), self.bucket_bytes)
        call.content, call.parts = layout.digest, layout.descriptions
        return layout

    def _keep_running(self, layout: GradientLayout, found: CollectedGradients) -> None:
        overlap = layout.overlap
        if overlap is not None and not overlap.lost and overlap.comm is self.comm and overlap.op is self.op:
            self._running.append((layout, overlap, found))

    def _agree(
        self, call: Call, layout: GradientLayout, found: CollectedGradients | None, missing: Sequence[int]
    ) -> int:
        """Agree on the call, and return the bits of all ranks, combined."""
        is_new = found is None or bool(found.sparse) or self.overlap is not (layout.overlap is not None)
        if self.overlap:
            is_new = is_new or not self._running or bool(self._running[0][1].order)
        bits = (_NEW_LAYOUT if is_new else 0) | (_MISSING if missing else 0)
        bits |= _COPIES if found is None and self._shares_buckets() else 0
        bits |= 0 if self._running else _LOST
        bits |= _STARTED if any(overlap.started for _, overlap, _ in self._running) else 0
        try:
            (combined,) = combine_bits(self.comm, call, [bits])()
            if combined & _MISSING and self.needs_all:
                self._raise_missing(call, layout, missing)
            if combined & _STARTED and combined & _LOST:
                self._give_up_running(call)
                combined |= _NEW_LAYOUT
        except RankwiseError:
            for _, overlap, _ in self._running:
                overlap.discard("has failed in sync_grads")
            raise
        return combined

    def _give_up_running(self, call: Call) -> None:
        """Leave the groups of reductions during backward, if they have changed no gradient, as not all ranks use them.

        Collective over the members.
        """
        for _, overlap, _ in self._running:
            overlap.discard("is in a group with ranks that do not reduce gradients during backward")
        call.begin_data()
        has_reduced = any(overlap.has_reduced for _, overlap, _ in self._running)
        (combined,) = combine_bits(self.comm, call, [int(has_reduced)])()
        self._running.clear()
        if combined:
            call.agreement_failed = True  # all members raise the same
            raise CollectiveError(
                "some ranks have reduced gradients during backward, and others have given up the step: it is lost, "
                "call zero_grad() and backward() again"
            )

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

    def _build(self, layout: GradientLayout, kinds: Sequence[int], *, is_lost: bool) -> None:
        """Make buckets on all ranks, and reduce them. Collective over the members.

        Args:
            layout: The new layout, or the one that gets new buckets.
            kinds: The kinds of the gradients of each parameter on any rank.
            is_lost: Whether some rank has no group for buckets.
        """
        for running in self._running:
            self._drain(*running)
        overlap, order = self._new_overlap(layout, is_lost=is_lost) if self.overlap else (None, None)
        for other in [layout, *layouts_of(self.parameters)]:
            other.dissolve(keep=None if overlap is None else overlap.group)
        sparse = [index for index, kind in enumerate(kinds) if kind & SPARSE]
        group = self.comm if overlap is None else overlap.group
        for plan in layout.plan(self.parameters, sparse, order or ()):
            shared = shared_tensor(group, plan.dtype, plan.numel) if plan.device.type == "cpu" else None
            # A block that exchanges nothing: an error in it is raised on all ranks, in what they call next.
            with self.comm.collective(Call("sync_grads", {"step": "buckets"}, is_data=True)):
                layout.add(Bucket(plan, group, shared), self.parameters)
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
        layout.attach(self.parameters, overlap)

    def _new_overlap(self, layout: GradientLayout, *, is_lost: bool) -> tuple[GradientOverlap, list[int]]:
        """Return the state of reductions during backward, and the order of the gradients. Collective."""
        call = Call("sync_grads", {"step": "order"}, is_data=True)
        with self.comm.collective(call):
            seen = {} if layout.overlap is None else layout.overlap.order
            data = self.comm.broadcast_bytes(call, json.dumps(list(seen)).encode(), 0)
        order: list[int] = json.loads(data)
        group = open_bucket_group(self.comm) if is_lost else self._running[0][1].group
        # Those without a gradient in the first step come last; in it, all are in the reverse order.
        rest = [index for index in reversed(range(len(self.parameters))) if index not in set(order)]
        return GradientOverlap(self.comm, group, self.op, is_ordered=bool(order)), [*order, *rest]

    def _drain(self, layout: GradientLayout, overlap: GradientOverlap, found: CollectedGradients) -> None:
        """Reduce the gradients of a layout that gets other buckets. Collective over the members."""
        overlap.finish(found.missing)
        parameters = layout.parameters()
        layout.put_back(parameters, found, some_missing=True)
        for index, parameter in enumerate(parameters if self.op is Op.SUM else ()):
            if parameter.grad is not None and index not in layout.sparse:
                parameter.grad.div_(self.comm.size)  # it is summed once more

    def _finish(self, layout: GradientLayout, found: CollectedGradients, *, some_missing: bool) -> None:
        """Give the parameters their reduced gradients. Collective over the members, if there are others to reduce."""
        if layout.overlap is not None:
            layout.overlap.finish(found.missing)
        layout.put_back(self.parameters, found, some_missing=some_missing)
        reduce_sparse(self.comm, [self.parameters[index] for index in sorted(layout.sparse)], self.op)

    def _raise_missing(self, call: Call, layout: GradientLayout, missing: Sequence[int]) -> NoReturn:
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
