"""A reduction of one value: what this rank knows of it alone, and then what the ranks make of it.

What fits in a frame is reduced here, by every rank in the order of ranks. The rest is one reduction by the backend for
each type and device.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rankwise._collectives.numpy_arrays import array_of, is_array, tensor_of
from rankwise._collectives.pytree import Tree, describe
from rankwise._collectives.scalars import check_number, fold_numbers, reduce_numbers
from rankwise._comm.buffers import as_bytes, contents, from_bytes, same_memory, to_tensor
from rankwise._comm.control.protocol import Call
from rankwise._comm.group import INLINE_BYTES, Comm, dense
from rankwise._comm.reduce_ops import OPS, Op, ReductionRecipe, fold, plan, require_differentiable
from rankwise.errors import InvalidArgumentError, PayloadTypeError


@dataclass(slots=True)
class _Bucket:
    """Tensors of one type on one device, which travel and are reduced as one.

    Attributes:
        how: How they are reduced.
        places: Which leaves they are.
        shapes: Their shapes.
        wire: All of them, flat, as they travel.
    """

    how: ReductionRecipe
    places: list[int]
    shapes: list[torch.Size]
    wire: torch.Tensor

    @classmethod
    def of(cls, leaves: Sequence[Any], places: list[int], op: Op, *, in_place: bool) -> _Bucket:
        tensors = [dense(leaves[place]) for place in places]
        first = tensors[0]
        how = plan(first.dtype, op)
        if in_place and how.wire_dtype == first.dtype and first.is_contiguous():
            wire = same_memory(first)
        else:
            wire = how.start(first if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors]))
        return cls(how, places, [tensor.shape for tensor in tensors], wire.reshape(-1))

    def results(self, size: int) -> list[torch.Tensor]:
        reduced = self.how.finish(self.wire, size)
        if len(self.places) == 1:
            return [reduced.reshape(self.shapes[0])]
        parts = reduced.split([shape.numel() for shape in self.shapes])
        # A view would keep all parts alive, and save all of them when it is saved.
        return [part.clone().reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(slots=True)
class ReduceRequest:
    """A reduction: made of what this rank alone knows, then run with the others.

    Attributes:
        tree: The value.
        numbers: Its numbers, with their places among the leaves.
        arrays: The places of its arrays, which are tensors here.
        buckets: Its tensors.
        small: The tensors fit into the frame.
    """

    comm: Comm
    call: Call
    op: Op
    tree: Tree
    numbers: dict[int, Any]
    arrays: set[int]
    buckets: list[_Bucket]
    small: bool

    @classmethod
    def of(cls, comm: Comm, call: Call, value: object, op: Op, *, in_place: bool = False) -> ReduceRequest:
        """Take a value apart, and check it.

        Raises:
            PayloadTypeError: The operation is not defined for a part of it.
        """
        tree = Tree.of(value)
        leaves = tree.leaves
        numbers: dict[int, Any] = {}
        arrays: set[int] = set()
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, leaf in enumerate(leaves):
            if is_array(leaf):
                leaves[place] = tensor_of(leaf)
                arrays.add(place)
            if isinstance(leaves[place], torch.Tensor):
                kinds.setdefault((leaves[place].dtype, leaves[place].device), []).append(place)
            elif leaf is not None:
                numbers[place] = leaves[place] = check_number(leaf, op)
        buckets = [_Bucket.of(leaves, places, op, in_place=in_place) for places in kinds.values()]
        described = [
            f"{'an array of ' if place in arrays else ''}{describe(leaf)}" for place, leaf in enumerate(leaves)
        ]
        call.content = f"{tree.text()} {' '.join(described)}"
        call.parts = lambda: dict(zip(tree.paths(), described, strict=True))
        nbytes = sum(bucket.wire.nbytes if bucket.wire.device.type == "cpu" else INLINE_BYTES + 1 for bucket in buckets)
        return cls(comm, call, op, tree, numbers, arrays, buckets, comm.uses_mesh and nbytes <= INLINE_BYTES)

    def places_of_tensors(self) -> list[int]:
        """Return which leaves are tensors, and were before: no arrays."""
        leaves = enumerate(self.tree.leaves)
        return [place for place, leaf in leaves if isinstance(leaf, torch.Tensor) and place not in self.arrays]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the leaves."""
        return [self.tree.leaves[place] for place in self.places_of_tensors()]

    def require_gradient(self) -> None:
        """Check that gradients can flow through it.

        Raises:
            InvalidArgumentError: Not through this operation.
            PayloadTypeError: Not through tensors of this type.
        """
        if not self.op.is_linear:
            linear = " and ".join(repr(op.name) for op in OPS.values() if op.is_linear)
            raise InvalidArgumentError(f"op={self.op.name!r} is not differentiable here; {linear} are")
        tensors = self.tensors()
        if not tensors:
            raise PayloadTypeError("gradients flow through tensors of floats, and there is no tensor in the value")
        for tensor in tensors:
            require_differentiable(tensor)

    def run(self) -> list[Any]:
        """Reduce it, and return the leaves of the result.

        Collective over the comm's members.
        """
        comm = self.comm
        messages: list[bytes] | None = None
        numbers: list[Any] = list(self.numbers.values())
        reduced: Callable[[], list[Any]] | None = None
        with comm.collective(self.call):
            moves = [] if self.small else [comm.reduce(bucket.wire, self.op) for bucket in self.buckets]
            if self._is_checked():
                inline = [contents(as_bytes(bucket.wire)) for bucket in self.buckets] if self.small else []
                messages = comm.verify(self.call, pickle.dumps((numbers, inline)))
            for move in moves:
                move()
            if messages is None and numbers:
                reduced = reduce_numbers(comm, numbers, self.op)
        if reduced is not None:
            numbers = reduced()
        if messages is not None:
            rows = [pickle.loads(message) for message in messages]
            numbers = fold_numbers([row[0] for row in rows], self.op)
            for place, bucket in enumerate(self.buckets if self.small else ()):
                parts = [from_bytes(to_tensor(row[1][place]), bucket.wire.dtype, bucket.wire.shape) for row in rows]
                bucket.wire = fold(parts, self.op, out=parts[0])
        leaves = list(self.tree.leaves)
        for place, number in zip(self.numbers, numbers, strict=True):
            leaves[place] = number
        for bucket in self.buckets:
            for place, result in zip(bucket.places, bucket.results(comm.size), strict=True):
                leaves[place] = array_of(result) if place in self.arrays else result
        return leaves

    def _is_checked(self) -> bool:
        """Return whether ranks agree first; where a single tensor is on an accelerator that is for the user to say."""
        leaves = self.tree.leaves
        single = len(leaves) == 1 and isinstance(leaves[0], torch.Tensor) and leaves[0].device.type != "cpu"
        return self.comm.check or not single
