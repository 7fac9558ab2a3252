"""The reduction of one value: first the steps that this rank does alone, then those that all ranks do together.

Numbers, and tensors that fit into a frame, are sent with the frames by which the ranks agree on the call: every rank
gets all operands and reduces them itself, in the order of ranks. Larger tensors are reduced by the transport, in one
operation for each dtype and device.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rankwise._collectives.numpy_arrays import array_from_tensor, is_array, tensor_from_array
from rankwise._collectives.pytree import A_NUMBER, PyTree, describe
from rankwise._collectives.scalars import NUMBER_TYPES, fold_numbers, to_python_number
from rankwise._comm.buffers import as_bytes, contents
from rankwise._comm.comm import INLINE_BYTES, Comm
from rankwise._comm.control.call import Call
from rankwise._comm.dense_tensors import dense
from rankwise._comm.reduce_ops import OPS, Op, ReductionRecipe, fold, plan, require_differentiable
from rankwise.errors import InvalidArgumentError, PayloadTypeError


@dataclass(slots=True)
class _Bucket:
    """Tensors of one dtype on one device, which are reduced as one flat tensor.

    Attributes:
        recipe: The wire format.
        indices: Their indices among the leaves.
        shapes: Their shapes.
        device: Their device.
        wire: All of them in wire format, flat.
    """

    recipe: ReductionRecipe
    indices: list[int]
    shapes: list[torch.Size]
    device: torch.device
    wire: torch.Tensor

    @classmethod
    def of(cls, leaves: Sequence[Any], indices: list[int], op: Op) -> _Bucket:
        tensors = [dense(leaves[index]) for index in indices]
        first = tensors[0]
        recipe = plan(first.dtype, op)
        wire = recipe.start(first if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors]))
        return cls(recipe, indices, [tensor.shape for tensor in tensors], first.device, wire.reshape(-1))

    def results(self, size: int) -> list[torch.Tensor]:
        reduced = self.recipe.finish(self.wire, size).to(self.device)
        if len(self.indices) == 1:
            return [reduced.reshape(self.shapes[0])]
        parts = reduced.split([shape.numel() for shape in self.shapes])
        # A view would keep the whole bucket alive, and torch.save would write all of it.
        return [part.clone().reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(slots=True)
class ReduceRequest:
    """One reduction: prepared by this rank alone, then run by all members.

    Everything that can fail on one rank is done before the members agree on the call, including the allocations for the
    transfer of data (the prepared moves in `exchange`). A rank that fails there sends its error in place of its frame,
    and no other rank waits for its data. After the agreement data is only moved.

    Attributes:
        tree: The value.
        numbers: Its numbers, by index among the leaves.
        arrays: The indices of its arrays, which are tensors in the tree.
        buckets: Its tensors and arrays.
        is_inline: Whether the contents of the tensors are sent with the frame.
        requires_gradient: Whether results require a gradient: before the exchange, since a tensor of this rank does;
            after it, since one of any rank does. None if gradients do not flow.
    """

    comm: Comm
    call: Call
    op: Op
    tree: PyTree
    numbers: dict[int, Any]
    arrays: set[int]
    buckets: list[_Bucket]
    is_inline: bool
    requires_gradient: bool | None = None
    # The reduced numbers and inline tensors, as `_fold` returns them; b"" if the wires of the buckets are reduced.
    _reduced: bytes = b""

    @classmethod
    def of(cls, comm: Comm, call: Call, value: object, op: Op) -> ReduceRequest:
        """Flatten a value, check it, and convert its tensors to wire format.

        Raises:
            PayloadTypeError: The operation is not defined for a leaf.
        """
        tree = PyTree.of(value)
        leaves = tree.leaves
        if type(value) in NUMBER_TYPES:  # what the rest would do, in less time
            number = leaves[0] = to_python_number(value, op)
            set_content(call, tree, (A_NUMBER,))
            return cls(comm, call, op, tree, {0: number}, set(), [], is_inline=True)
        numbers: dict[int, Any] = {}
        arrays: set[int] = set()
        tensors: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) and is_array(leaf):
                leaves[index] = tensor_from_array(leaf)
                arrays.add(index)
            if isinstance(leaves[index], torch.Tensor):
                tensors.setdefault((leaves[index].dtype, leaves[index].device), []).append(index)
            elif leaf is not None:
                numbers[index] = leaves[index] = to_python_number(leaf, op)
        buckets = [_Bucket.of(leaves, indices, op) for indices in tensors.values()]
        described = [
            f"{'an array of ' if index in arrays else ''}{describe(leaf)}" for index, leaf in enumerate(leaves)
        ]
        set_content(call, tree, described)
        # Contents on an accelerator are never sent with a frame: to read them here would wait for the device.
        nbytes = sum(bucket.wire.nbytes if bucket.wire.device.type == "cpu" else INLINE_BYTES + 1 for bucket in buckets)
        return cls(comm, call, op, tree, numbers, arrays, buckets, nbytes <= comm.most_inline_bytes)

    def tensor_indices(self) -> list[int]:
        """Return the indices of the leaves that are tensors and not arrays."""
        leaves = enumerate(self.tree.leaves)
        return [index for index, leaf in leaves if isinstance(leaf, torch.Tensor) and index not in self.arrays]

    def tensors(self) -> list[torch.Tensor]:
        """Return the leaves that are tensors and not arrays."""
        return [self.tree.leaves[index] for index in self.tensor_indices()]

    def require_gradient(self) -> None:
        """Let gradients flow through the reduction.

        Raises:
            InvalidArgumentError: The operation is not differentiable.
            PayloadTypeError: Gradients cannot flow through one of the tensors, or there is no tensor.
        """
        if not self.op.is_linear:
            linear = " and ".join(repr(op.name) for op in OPS.values() if op.is_linear)
            raise InvalidArgumentError(f"op={self.op.name!r} is not differentiable here; {linear} are")
        tensors = self.tensors()
        if not tensors:
            raise PayloadTypeError("gradients flow through tensors of floats, and there is no tensor in the value")
        for tensor in tensors:
            require_differentiable(tensor)
        self.requires_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def run(self) -> list[Any]:
        """Reduce the value, and return the leaves of the result.

        Collective over the members of the comm.
        """
        with self.call:
            self.exchange()
        return self.leaves()

    def exchange(self) -> None:
        """Agree on the call and transfer the data, in the block of a call; `leaves` has the result after it."""
        comm = self.comm
        numbers: list[Any] = list(self.numbers.values())
        if self.requires_gradient is not None:
            if comm.control.checks_tensors or comm.size == 1 or self._single_tensor() is None:
                numbers.append(int(self.requires_gradient))
            else:
                self.requires_gradient = True  # the other ranks are not asked
        moves = [] if self.is_inline else [comm.planes.reduce(bucket.wire, self.op) for bucket in self.buckets]
        if not self.is_inline and not numbers:
            if (single := self._single_tensor()) is None:
                self.call.verify()
            else:
                self.call.verify_tensor(single)
        else:
            inline = [_contents(bucket.wire) for bucket in self.buckets] if self.is_inline and self.buckets else []
            self._reduced = self.call.reduce(pickle.dumps((numbers, inline)), self._fold)
        for move in moves:
            move()

    def _fold(self, messages: Sequence[bytes]) -> bytes:
        """Reduce the numbers and the inline tensors of all ranks, in the order of ranks."""
        rows = [pickle.loads(message) for message in messages]
        tensors = []
        for index, bucket in enumerate(self.buckets if self.is_inline else ()):
            parts = [_from_contents(row[1][index], bucket.wire.dtype) for row in rows]
            tensors.append(_contents(fold(parts, self.op, out=parts[0])))
        return pickle.dumps((fold_numbers([row[0] for row in rows], self.op) if rows[0][0] else (), tensors))

    def leaves(self, *, is_receiver: bool = True) -> list[Any]:
        """Return the leaves of the result, after the block: errors and allocations concern this rank alone.

        A member that does not receive the result has no leaves.
        """
        if not is_receiver:
            return []
        numbers: Sequence[Any] = ()
        if self._reduced:
            numbers, tensors = pickle.loads(self._reduced)
            if self.is_inline:
                for bucket, data in zip(self.buckets, tensors, strict=True):
                    bucket.wire = _from_contents(data, bucket.wire.dtype)
        leaves = list(self.tree.leaves)
        if len(numbers) > len(self.numbers):
            *numbers, flag = numbers
            self.requires_gradient = flag > 0
        for index, number in zip(self.numbers, numbers, strict=True):
            leaves[index] = number
        for bucket in self.buckets:
            for index, result in zip(bucket.indices, bucket.results(self.comm.size), strict=True):
                leaves[index] = array_from_tensor(result) if index in self.arrays else result
        return leaves

    def _single_tensor(self) -> torch.Tensor | None:
        """Return the tensor on an accelerator that is all of the value; None if the value is another one."""
        leaves = self.tree.leaves
        single = leaves[0] if len(leaves) == 1 and isinstance(leaves[0], torch.Tensor) else None
        return None if single is None or single.device.type == "cpu" else single


def set_content(call: Call, tree: PyTree, described: Sequence[str]) -> None:
    """Describe a value in its call: its containers, and its leaves, given as `describe` returns them."""
    call.content = f"{tree.text} {' '.join(described)}"
    call.parts = lambda: tree.parts(described)


def _contents(wire: torch.Tensor) -> bytes:
    """Return the contents of a contiguous tensor on the CPU."""
    address = wire.data_ptr()
    # `contents` has the error of tensors without memory, and the result of those without elements.
    return ctypes.string_at(address, wire.nbytes) if address else contents(as_bytes(wire))


def _from_contents(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor on the CPU with a copy of these contents."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
