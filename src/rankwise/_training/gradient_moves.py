"""Gradients that backward has made anew are moved to their buckets; small ones with few calls for many tensors.

The time of a step with many small tensors is that of Python and of the calls of torch, not that of copies.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rankwise._torch import copy_each, kinds_of, plain_kind
from rankwise._training.gradient_buckets import Bucket


@dataclass(slots=True)
class CollectedGradients:
    """The gradients of this rank, once those that are in buckets are there.

    Attributes:
        missing: The indices of parameters without a gradient.
        sparse: The indices of those with a sparse gradient that have a place in a bucket.
        in_place: Gradients that stay where they are, by index: views of memory of the program, or parts of a graph.
    """

    missing: list[int] = field(default_factory=list)
    sparse: list[int] = field(default_factory=list)
    in_place: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class NewGradients:
    """Gradients that views of buckets are to replace, with their parameters and these views."""

    parameters: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)

    def add(self, parameter: torch.Tensor, grad: torch.Tensor, view: torch.Tensor) -> None:
        """Note one of them."""
        self.parameters.append(parameter)
        self.grads.append(grad)
        self.views.append(view)

    def move(self, copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = copy_each) -> bool:
        """Replace the gradients by views with their values; return False, and replace none, if a view does not fit.

        Args:
            copy: Copies the gradients to the views.
        """
        if not self.grads:
            return True
        try:
            copy(self.views, self.grads)
            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.grad = view
        except RuntimeError:
            pairs = zip(self.grads, self.views, strict=True)
            if all(grad.shape == view.shape and grad.device == view.device for grad, view in pairs):
                raise
            for parameter, grad in zip(self.parameters, self.grads, strict=True):
                parameter.grad = grad
            return False
        return True


class SmallGradients:
    """The gradients of a bucket that have no hook.

    Attributes:
        indices: The indices of their parameters.
    """

    def __init__(self, bucket: Bucket, indices: Sequence[int], views: Sequence[torch.Tensor]) -> None:
        """Describe their places.

        Args:
            bucket: The bucket.
            indices: The indices of the parameters, in the order of the bucket.
            views: The views for their gradients.
        """
        self.indices = indices
        self._kinds = [plain_kind(view.dtype, view.nbytes) for view in views]
        # All of them, if they have one dimension and lie one after the other: one operation can write to it.
        self._span: torch.Tensor | None = None
        start, numel = views[0].storage_offset(), sum(view.numel() for view in views)
        if all(view.dim() == 1 for view in views) and views[-1].storage_offset() + views[-1].numel() == start + numel:
            self._span = bucket.flat[start : start + numel]

    def move(self, parameters: Sequence[torch.Tensor], views: Sequence[torch.Tensor | None]) -> bool | None:
        """Move the gradients to the bucket, given the parameters of the layout and the views for their gradients.

        Returns:
            Whether they were moved; None, with no change, unless all of them are new and ordinary tensors.
        """
        own = [parameters[index] for index in self.indices]
        grads: list[Any] = [parameter.grad for parameter in own]
        if kinds_of(grads) != self._kinds:
            return None
        places: list[Any] = [views[index] for index in self.indices]
        return NewGradients(own, grads, places).move(copy_each if self._span is None else self._copy)

    def _copy(self, _: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        torch.cat(grads, out=self._span)


def small_gradients(
    bucket: Bucket, views: Sequence[torch.Tensor | None], hooked: Container[int]
) -> list[SmallGradients]:
    """Return the gradients of a bucket that have no hook: those of one dimension, and the others.

    Args:
        bucket: The bucket.
        views: The views for the gradients of all parameters.
        hooked: The indices of the parameters with a hook.
    """
    parts: dict[bool, dict[int, torch.Tensor]] = {True: {}, False: {}}
    for index in bucket.plan.indices:
        view = views[index]
        if view is not None and index not in hooked:
            parts[view.dim() == 1][index] = view
    return [SmallGradients(bucket, list(part), list(part.values())) for part in parts.values() if part]
