"""Buckets: persistent memory for the gradients of several parameters, reduced as one tensor.

At the end of a bucket is a presence count for each of its gradients, which is reduced with them: it is 0 where no rank
has a gradient. Buckets are made of parameters, of one dtype and device each, in the same order on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rankwise._comm.comm import Comm
from rankwise._comm.control.transports import Prepared
from rankwise._comm.data.shared_tensor import SharedTensor
from rankwise._comm.reduce_ops import Op
from rankwise._training.gradient_averaging import gradient_strides

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A bucket without its memory.

    Attributes:
        dtype: The dtype of its gradients.
        device: Their device.
        indices: The indices of its parameters.
        numels: The numbers of elements of these.
    """

    dtype: torch.dtype
    device: torch.device
    indices: list[int]
    numels: list[int]

    @property
    def numel(self) -> int:
        """The number of elements, with the presence counts."""
        return sum(self.numels) + len(self.numels)


def plan_buckets(gradients: Sequence[tuple[int, torch.Tensor, torch.dtype]], max_bytes: float) -> list[BucketPlan]:
    """Return buckets of at most so many bytes, or of one gradient, given the index, parameter and dtype of each."""
    open_plans: dict[tuple[torch.dtype, torch.device], BucketPlan] = {}
    plans: list[BucketPlan] = []
    for index, parameter, dtype in gradients:
        kind = dtype, parameter.device
        plan = open_plans.get(kind)
        if plan is None or (sum(plan.numels) + parameter.numel()) * dtype.itemsize > max_bytes:
            plan = open_plans[kind] = BucketPlan(dtype, parameter.device, [], [])
            plans.append(plan)
        plan.indices.append(index)
        plan.numels.append(parameter.numel())
    return plans


class Bucket:
    """The gradients of several parameters, one after the other, and their presence counts.

    Attributes:
        plan: The parameters in it.
        flat: Its memory.
    """

    __slots__ = ("_counts", "_group", "_shared", "flat", "plan")

    def __init__(self, plan: BucketPlan, group: Comm, shared: SharedTensor | None) -> None:
        """Allocate the memory of a bucket, or use memory that the members of a group share."""
        self.plan = plan
        self._group = weakref.ref(group)
        self._shared = shared
        if shared is None:
            self.flat = torch.empty(plan.numel, dtype=plan.dtype, device=plan.device)
        else:
            self.flat = shared.tensor
        self._counts = self.flat[plan.numel - len(plan.numels) :]

    def views(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a view for the gradient of each of its parameters, with the strides of the parameter."""
        offset, views = 0, []
        for index, numel in zip(self.plan.indices, self.plan.numels, strict=True):
            parameter = parameters[index]
            views.append(self.flat.as_strided(parameter.shape, gradient_strides(parameter), offset))
            offset += numel
        return views

    def count(self, missing: Sequence[int]) -> None:
        """Set the presence counts of this rank, given the indices of the parameters without a gradient."""
        self._counts.fill_(1)
        if missing:
            own = set(missing)
            for place, index in enumerate(self.plan.indices):
                if index in own:
                    self._counts[place] = 0

    def present(self) -> list[int]:
        """Return the indices of the parameters that have a gradient on some rank, after the reduction."""
        counts = self._counts.real if self.flat.is_complex() else self._counts
        return [index for index, has in zip(self.plan.indices, (counts > 0).tolist(), strict=True) if has]

    def prepare(self, comm: Comm, op: Op) -> Prepared[None]:
        """Prepare the reduction, in place. Half precision is summed in float32, where the sum does not overflow."""
        if self._shared is not None and self._group() is comm and (op.is_mean or self.plan.dtype not in _HALVES):
            return self._shared.reduce(op)
        wire = self.flat.float() if self.plan.dtype in _HALVES else self.flat
        reduce = comm.reduce(wire, Op.SUM)
        divisor = comm.size if op.is_mean else 1

        def run() -> None:
            reduce()
            if divisor != 1:
                wire.div_(divisor)
            if wire is not self.flat:
                self.flat.copy_(wire)

        return run
