"""The layout of gradients in buckets, which belongs to parameters: made by the first `sync_grads`, used by the next.

Parameters have no attribute for it, so that copies and pickles of them have no layout. Between backward and
`sync_grads` a gradient is in its bucket already, or a tensor of its own: `zero_grad()` sets gradients to None, and
backward then makes new ones. A hook moves a new large gradient to its bucket at once, so that its memory is used again
by the next one; small ones are moved together, by `collect`.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from rankwise._comm.buffers import is_expanded, overwrite
from rankwise._comm.comm import Comm
from rankwise._torch import is_view
from rankwise._training.gradient_averaging import checked_gradient_type, described_gradient
from rankwise._training.gradient_buckets import Bucket, BucketPlan, plan_buckets
from rankwise._training.gradient_moves import CollectedGradients, NewGradients, SmallGradients, small_gradients
from rankwise._training.gradient_overlap import GradientOverlap
from rankwise.errors import CollectiveError

# A new gradient of at least so many bytes is moved to its bucket by a hook; smaller ones together, in less time.
_HOOKED_BYTES: Final = 1 << 16

_layouts: Final = WeakIdKeyDictionary()


class GradientLayout:
    """The places of the gradients of some parameters in buckets.

    Attributes:
        names: The names of the parameters.
        sparse: The indices of the parameters whose gradients are sparse, on any rank; these have no place in a bucket.
        buckets: The buckets, in the order in which they are reduced.
        digest: A digest of the names, shapes and dtypes, the same on all ranks.
        attached: It belongs to the parameters, and has buckets.
        overlap: The reductions during backward; None if there are none.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str], bucket_bytes: float) -> None:
        """Describe parameters, without memory for their gradients.

        Raises:
            PayloadTypeError: A parameter has no gradient that could be averaged.
        """
        self.names = names
        self.bucket_bytes = bucket_bytes
        self.sparse: frozenset[int] = frozenset()
        self.buckets: list[Bucket] = []
        self.attached = False
        self.overlap: GradientOverlap | None = None
        self._references = [weakref.ref(parameter) for parameter in parameters]
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._gradient_dtypes = [checked_gradient_type(parameter) for parameter in parameters]
        self._descriptions = list(map(described_gradient, parameters))
        # Gradients, and other views of the same memory: the program may give a gradient other memory.
        self._views: list[torch.Tensor | None] = [None] * len(parameters)
        self._places: list[torch.Tensor | None] = [None] * len(parameters)
        self._addresses = [0] * len(parameters)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # What `collect` moves together, and the indices of all others.
        self._small: list[SmallGradients] = []
        self._others: Sequence[int] = range(len(parameters))
        text = str(self.descriptions()).encode(errors="backslashreplace")
        self.digest = hashlib.blake2b(text, digest_size=16).hexdigest()

    def descriptions(self) -> dict[str, str]:
        """Return a description of each parameter and its gradient, by name."""
        return dict(zip(self.names, self._descriptions, strict=True))

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that still exist."""
        return [parameter for reference in self._references if (parameter := reference()) is not None]

    def matches(self, parameters: Sequence[torch.Tensor], bucket_bytes: float) -> bool:
        """Return whether this is the layout of these parameters, and their dtypes have not changed."""
        return (
            len(parameters) == len(self._references)
            and bucket_bytes == self.bucket_bytes
            and all(map(operator.is_, [reference() for reference in self._references], parameters))
            and [parameter.dtype for parameter in parameters] == self._dtypes
        )

    def plan(self, parameters: Sequence[torch.Tensor], sparse: Iterable[int], order: Sequence[int]) -> list[BucketPlan]:
        """Plan the buckets.

        Args:
            parameters: The parameters.
            sparse: The indices of those whose gradients are sparse on some rank.
            order: The indices of all, in the order in which they are put into buckets; none for that in which `collect`
                takes the least time.
        """
        self.sparse = frozenset(sparse)
        if not order:
            order = sorted(range(len(parameters)), key=lambda index: self._order(index, parameters[index]))
        dense = [
            (index, parameters[index], self._gradient_dtypes[index]) for index in order if index not in self.sparse
        ]
        return plan_buckets(dense, self.bucket_bytes)

    def add(self, bucket: Bucket, parameters: Sequence[torch.Tensor]) -> None:
        """Move the gradients of a bucket's parameters to it."""
        self.buckets.append(bucket)
        for index, view in zip(bucket.plan.indices, bucket.views(parameters), strict=True):
            self._views[index] = view
            self._places[index] = view.detach()
            self._addresses[index] = view.data_ptr()
            grad = parameters[index].grad
            if grad is not None and self._is_ordinary(grad, index) and self._fits(index, grad):
                view.copy_(grad)
                parameters[index].grad = view

    def attach(self, parameters: Sequence[torch.Tensor], overlap: GradientOverlap | None) -> None:
        """Make this the layout of its parameters."""
        self.attached, self.overlap, not_hooked = True, overlap, 0.0
        hooked = set()
        if overlap is not None:
            overlap.begin_step(self.buckets, self.digest)
        for index, (parameter, view) in enumerate(zip(parameters, self._views, strict=True)):
            _layouts[parameter] = self
            if view is None:
                continue
            not_hooked += view.nbytes
            if overlap is not None or view.nbytes >= _HOOKED_BYTES or not_hooked > self.bucket_bytes:
                not_hooked -= view.nbytes
                hooked.add(index)
                hook = functools.partial(self._accumulated, index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self._small = [part for bucket in self.buckets for part in small_gradients(bucket, self._views, hooked)]
        together = {index for part in self._small for index in part.indices}
        self._others = [index for index in range(len(parameters)) if index not in together]

    def dissolve(self, *, keep: Comm | None = None) -> None:
        """Remove the layout from its parameters; gradients stay views of the buckets.

        Args:
            keep: The group of reductions during backward, if it is used again.
        """
        if self.overlap is not None and self.overlap.group is not keep:
            self.overlap.discard("has released its gradients")
        self.overlap = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._small.clear()
        self.buckets.clear()
        self.attached = False
        for reference, view in zip(self._references, self._views, strict=True):
            if (parameter := reference()) is None:
                continue
            if view is not None and parameter.grad is view:
                parameter.grad = view.data  # of the same memory, but an ordinary gradient for the next layout
            if _layouts.get(parameter) is self:
                del _layouts[parameter]
        self._views = [None] * len(self._views)
        self._places = [None] * len(self._views)

    def release(self) -> None:
        """Dissolve the layout, and give its gradients memory of their own."""
        for reference, view in zip(self._references, self._views, strict=True):
            parameter = reference()
            if parameter is not None and view is not None and parameter.grad is view:
                parameter.grad = view.clone()
        self.dissolve()

    def collect(self, parameters: Sequence[torch.Tensor]) -> CollectedGradients | None:
        """Move the gradients to the buckets; None if a parameter has changed so that its place does not fit."""
        found, others = CollectedGradients(), list(self._others)
        for small in self._small:
            if not (is_moved := small.move(parameters, self._views)):
                others += small.indices
            if is_moved is False:
                return None
        new = NewGradients()
        if not all(self._collect_one(index, parameters[index], new, found) for index in others):
            return None
        if not (all(self._fits(index, parameters[index]) for index in found.missing) and new.move()):
            return None
        for bucket in self.buckets if self.overlap is None else ():
            bucket.count(found.missing)
        return found

    def put_back(self, parameters: Sequence[torch.Tensor], found: CollectedGradients, *, some_missing: bool) -> None:
        """Give parameters the reduced gradients of the buckets.

        Args:
            parameters: The parameters.
            found: What `collect` returned.
            some_missing: Whether a gradient is missing on any rank.
        """
        for index, grad in found.in_place.items():
            if (view := self._views[index]) is not None:
                overwrite(grad, view)
        if some_missing and found.missing:
            present = {index for bucket in self.buckets for index in bucket.present()}
            for index in present.intersection(found.missing):
                parameters[index].grad = self._views[index]

    def _is_ordinary(self, grad: torch.Tensor, index: int) -> bool:
        """Return whether a gradient is an ordinary tensor, which a view of a bucket can replace."""
        return (
            grad.layout is torch.strided
            and grad.dtype is self._gradient_dtypes[index]
            and not ((grad.requires_grad or is_view(grad)) and not is_expanded(grad))
        )

    def _collect_one(self, index: int, parameter: torch.Tensor, new: NewGradients, found: CollectedGradients) -> bool:
        """Collect a gradient; return False if it does not fit in its place."""
        grad, view = parameter.grad, self._views[index]
        if grad is view and view is not None and view.data_ptr() == self._addresses[index]:
            return True
        if self.overlap is not None and self.overlap.has_started(index):
            text = f"the gradient of {self.names[index]} was replaced or set to None while it was being reduced"
            raise CollectiveError(f"{text}: with overlap=True, change gradients after sync_grads")
        if grad is not None and grad is view and self._fits(index, grad):
            # The program has given it other memory, as by `parameter.grad.data = ...`.
            new.add(parameter, grad, self._new_view(index))
        elif grad is not None and view is not None and self._is_ordinary(grad, index):
            new.add(parameter, grad, view)
        else:
            return self._collect_other(index, grad, view, found)
        return True

    def _collect_other(
        self, index: int, grad: torch.Tensor | None, view: torch.Tensor | None, found: CollectedGradients
    ) -> bool:
        """Collect a gradient that is not an ordinary tensor; return False if it does not fit in its place."""
        if grad is None:
            found.missing.append(index)
        if view is None:
            return True
        if grad is None:
            view.zero_()
        elif grad.layout is not torch.strided:
            found.sparse.append(index)
            view.zero_()
        elif grad is view or grad.dtype is not self._gradient_dtypes[index]:
            return False
        else:
            view.copy_(grad)
            found.in_place[index] = grad
        return True

    def _order(self, index: int, parameter: torch.Tensor) -> int:
        """Return the place of a gradient among the kinds of them: small ones of one dimension are next to another."""
        is_small = parameter.numel() * self._gradient_dtypes[index].itemsize < _HOOKED_BYTES
        return is_small * (1 if parameter.dim() == 1 else 2)

    def _fits(self, index: int, tensor: torch.Tensor) -> bool:
        """Return whether a parameter or gradient has the shape and device of its place."""
        place = self._places[index]
        return place is None or (place.shape == tensor.shape and place.device == tensor.device)

    def _new_view(self, index: int) -> torch.Tensor:
        place = self._places[index]
        if place is None:
            raise KeyError(index)
        view = self._views[index] = place.detach()
        return view

    def _accumulated(self, index: int, parameter: torch.Tensor) -> None:
        """Move a gradient to its bucket, as a hook of backward, and start the bucket if it is to be reduced now."""
        grad, view, overlap = parameter.grad, self._views[index], self.overlap
        if grad is None or view is None:
            return
        if overlap is not None:
            overlap.require_open(index, self.names[index], is_new=grad is not view)
        if grad is not view:
            if not (self._is_ordinary(grad, index) and self._fits(index, grad)):
                return
            view.copy_(grad)
            parameter.grad = view
        if overlap is not None:
            overlap.accumulated(index)


def layout_of(parameter: torch.Tensor) -> GradientLayout | None:
    """Return the layout that a parameter belongs to."""
    found: GradientLayout | None = _layouts.get(parameter)
    return found


def layouts_of(parameters: Iterable[torch.Tensor]) -> Iterator[GradientLayout]:
    """Yield the layouts of some parameters, each once."""
    yield from {id(layout): layout for one in parameters if (layout := layout_of(one)) is not None}.values()
