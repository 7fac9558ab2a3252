"""Reductions of tensors where they are, many at once: one operation for each dtype and device.

What fits into a frame travels with the agreement on the call. On the CPU, tensors pass through the shared memory of a
host part by part; elsewhere they are copied into one flat tensor, and back.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, TypeAlias

import torch

from rankwise._collectives.memory_places import are_disjoint, check_writable, repeated
from rankwise._collectives.pytree import describe
from rankwise._comm.buffers import overwrite, same_memory
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call, Move
from rankwise._comm.control.verdict import Combine
from rankwise._comm.dense_tensors import dense
from rankwise._comm.reduce_ops import HALVES, Op, ReductionRecipe, fold, plan
from rankwise._torch import copy_each
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import PayloadTypeError

_PLACE: Final = attrgetter("dtype", "device")
_NBYTES: Final = attrgetter("nbytes")

Place: TypeAlias = tuple[torch.dtype, torch.device]


@dataclass(slots=True, eq=False)
class _Group:
    """Tensors of one dtype on one device.

    Attributes:
        recipe: How they are reduced.
        tensors: The tensors, contiguous.
        nbytes: The length of each.
        move: Reduces them, or a copy of them.
        finish: Gives them the results of that.
    """

    recipe: ReductionRecipe
    tensors: Sequence[torch.Tensor]
    nbytes: Sequence[int]
    move: Move = lambda: None
    finish: Callable[[], None] = lambda: None


class InPlaceReduction:
    """One reduction of tensors: prepared by this rank alone, then run by all members, in the block of a call.

    All that can fail on one rank is done before the members agree, and nothing is written before. If a member is lost
    after that, some tensors may be reduced and others not.

    Attributes:
        total_weight: The sum of the weights of all members, which is set before `finish` where they have weights.
        same: The names of tensors that have the memory of others, and the names of these. It has to be the same on all
            members, as the descriptions of the tensors have.
    """

    def __init__(
        self,
        comm: Comm,
        tensors: Sequence[torch.Tensor],
        op: Op,
        *,
        place: Place | None,
        name: Callable[[int], str],
        is_wide: bool = False,
        is_last: bool = True,
        weight: float | None = None,
    ) -> None:
        """Check tensors, and allocate what their reduction needs.

        Args:
            comm: The group.
            tensors: The tensors. One that has the same memory as another is reduced once.
            op: The reduction; the dtype of its results is that of the tensors.
            place: Their `common_place`.
            name: Returns the name of a tensor for error messages, given its index.
            is_wide: Half-precision floats are summed in float32; their means always are.
            is_last: No exchange follows in this operation. Otherwise nothing travels with the agreement: to reduce that
                allocates memory, and may fail on one rank alone, which the others would wait for.
            weight: What the tensors of this rank count in a mean; at 0 they are not used. Nothing travels with the
                agreement then, and a copy of the tensors is reduced.

        Raises:
            PayloadTypeError: A tensor cannot be reduced in place, or has a part of its memory in common with another.
        """
        self._comm, self._op, self._weight = comm, op, weight
        self._divisor = comm.size if op.is_mean and weight is None else 1
        self.total_weight: float = 1
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.same: dict[str, str] = {}
        nbytes = list(map(_NBYTES, tensors)) if place is not None else []
        if place is not None and _have_own_memory(tensors, nbytes):
            self._groups = [_Group(_recipe(place[0], op, is_wide=is_wide), tensors, nbytes)]
        else:
            self._groups = self._grouped(tensors, name, is_wide=is_wide)
        self._is_inline = (
            is_last
            and weight is None
            and comm.size > 1
            and sum(sum(group.nbytes) for group in self._groups) <= comm.most_inline_bytes
            and all(group.tensors[0].device.type == "cpu" for group in self._groups)
        )
        self._reduced = b""
        for group in [] if self._is_inline else self._groups:
            self._prepare(group)

    def agree(self, call: Call, note: bytes = b"", combine: Combine | None = None) -> bytes:
        """Agree on the call, and return the combination of the notes of all members; b"" without."""
        if combine is None and not self._is_inline:
            call.verify()
            return b""

        def combine_all(messages: Sequence[bytes]) -> bytes:
            notes, contents = zip(*map(pickle.loads, messages), strict=True)
            return pickle.dumps((b"" if combine is None else combine(notes), self._fold(contents)))

        contents = self._contents() if self._is_inline else None
        result = call.reduce(pickle.dumps((note, contents)), combine_all)
        combined, self._reduced = pickle.loads(result)
        return bytes(combined)

    def run(self) -> None:
        """Reduce the tensors, once the members agree."""
        for group in self._groups:
            group.move()

    def finish(self) -> None:
        """Give the tensors their results, after the block: no other member waits for this one any more."""
        if self._is_inline:
            self._store()
        for group in self._groups:
            group.finish()
        for tensor, values in self._copies:
            overwrite(tensor, values)

    def _grouped(self, tensors: Sequence[torch.Tensor], name: Callable[[int], str], *, is_wide: bool) -> list[_Group]:
        """Return tensors of any form as contiguous ones, by dtype and device."""
        targets = [self._contiguous(tensor) for tensor in tensors]
        same = repeated(tensors, name)
        self.same = {name(index): name(first) for index, first in same.items()}
        groups: dict[Place, list[torch.Tensor]] = {}
        for index, target in enumerate(targets):
            if index not in same:
                groups.setdefault(_PLACE(target), []).append(target)
        return [
            _Group(_recipe(dtype, self._op, is_wide=is_wide), group, list(map(_NBYTES, group)))
            for (dtype, _), group in groups.items()
        ]

    def _contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as a contiguous one, whose contents are copied back if its memory is not the tensor's."""
        target = dense(tensor)
        check_writable(tensor, "use all_reduce, or pass tensor.clone()")
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return target
        copy = target.contiguous()
        self._copies.append((tensor, copy))
        return copy

    def _prepare(self, group: _Group) -> None:
        """Prepare the reduction of a group that does not travel with the agreement."""
        first, recipe, comm = group.tensors[0], group.recipe, self._comm
        is_on_xla = first.device.type == DEVICE_TYPE
        memory = comm.planes.shared_memory if first.device.type == "cpu" else None
        is_wide = recipe.wire_dtype is torch.float32 and first.dtype in HALVES
        is_alone = comm.size == 1 and not is_on_xla  # the reduction of one tensor is that tensor
        is_weighted = self._weight is not None
        if not is_weighted and (is_alone or (memory is not None and (is_wide or recipe.wire_dtype is first.dtype))):
            if memory is not None:
                group.move = memory.reduce_in_place(group.tensors, self._op, divisor=self._divisor, is_wide=is_wide)
            # Torch does not know of what was written to memory.
            group.finish = lambda: torch.autograd.graph.increment_version(group.tensors)
            return
        is_wire = recipe.wire_dtype is first.dtype
        if len(group.tensors) == 1:
            wire = same_memory(first) if is_wire and not is_weighted else recipe.start(first)
        else:
            flat = torch.cat([tensor.view(-1) for tensor in group.tensors])
            wire = flat if is_wire and not is_on_xla else recipe.start(flat)
        if self._weight is not None:
            wire = wire.mul_(self._weight) if self._weight else wire.zero_()
        group.move = comm.planes.reduce(wire.reshape(-1), self._op)

        def finish() -> None:
            if is_weighted:
                wire.div_(self.total_weight or 1)  # a total of 0 is that of zeros
            reduced = recipe.finish(wire, self._divisor).to(first.device).reshape(-1)
            parts = reduced.split([tensor.numel() for tensor in group.tensors])
            values = [part.view(tensor.shape) for part, tensor in zip(parts, group.tensors, strict=True)]
            if len(values) > 1 and not is_on_xla and not any(map(torch.Tensor.is_inference, group.tensors)):
                copy_each(list(group.tensors), values)
                return
            for tensor, value in zip(group.tensors, values, strict=True):
                overwrite(tensor, value)

        group.finish = finish

    def _contents(self) -> bytes:
        return b"".join(
            part
            for group in self._groups
            for part in map(ctypes.string_at, map(torch.Tensor.data_ptr, group.tensors), group.nbytes)
        )

    def _fold(self, contents: Sequence[bytes | None]) -> bytes:
        """Reduce the contents of all members, in the order of ranks; nothing if some are of other tensors."""
        found = [one for one in contents if one is not None]
        if len(found) < len(contents) or len(set(map(len, found))) > 1:
            return b""
        results, offset = [], 0
        for group in self._groups:
            end = offset + sum(group.nbytes)
            if offset == end:
                continue
            dtype, recipe = group.tensors[0].dtype, group.recipe
            parts = [torch.frombuffer(bytearray(one[offset:end]), dtype=dtype) for one in found]
            if recipe.wire_dtype is not dtype:
                parts = list(map(recipe.start, parts))
            reduced = recipe.finish(fold(parts, self._op, out=parts[0]), self._divisor)
            results.append(ctypes.string_at(reduced.data_ptr(), reduced.nbytes))
            offset = end
        return b"".join(results)

    def _store(self) -> None:
        """Write the reduced contents to the tensors."""
        memory = ctypes.create_string_buffer(self._reduced, len(self._reduced))
        start = ctypes.addressof(memory)
        for group in self._groups:
            ends = list(itertools.accumulate(group.nbytes, initial=start))
            deque(map(ctypes.memmove, map(torch.Tensor.data_ptr, group.tensors), ends, group.nbytes), maxlen=0)
            torch.autograd.graph.increment_version(group.tensors)
            start = ends[-1]


@functools.cache
def _recipe(dtype: torch.dtype, op: Op, *, is_wide: bool) -> ReductionRecipe:
    """Return how tensors of a dtype are reduced.

    Raises:
        PayloadTypeError: They have no such reduction, or its result has another dtype.
    """
    recipe = plan(dtype, Op.MEAN if is_wide and dtype in HALVES else op)
    result = recipe.finish(torch.empty(0, dtype=recipe.wire_dtype, device="cpu"), 1).dtype
    if result != dtype:
        raise PayloadTypeError(f"op={op.name!r} of {dtype} has another dtype, {result}: use all_reduce")
    return recipe


def _have_own_memory(tensors: Sequence[torch.Tensor], nbytes: Sequence[int]) -> bool:
    """Return whether no two contiguous tensors have memory in common."""
    starts = list(map(torch.Tensor.data_ptr, tensors))
    return are_disjoint(starts, list(map(operator.add, starts, nbytes)))


def described(tensors: Sequence[torch.Tensor], place: Place | None) -> str:
    """Return the shapes, dtypes and devices of tensors, given their `common_place`, in less time than by `describe`.

    Devices have the numbers of their first use: on all ranks, the same tensors are on the same device as others.
    """
    places = [place] * bool(tensors) if place is not None else list(map(_PLACE, tensors))
    kinds = list(dict.fromkeys(places))
    devices = list(dict.fromkeys(device for _, device in kinds))
    texts = [f"{dtype} on {device.type} {devices.index(device)}" for dtype, device in kinds]
    order = list(map(kinds.index, places)) if len(kinds) > 1 else ""
    return f"{[tensor.shape for tensor in tensors]} {texts} {order}"


def descriptions(names: Sequence[str], tensors: Sequence[torch.Tensor], same: Mapping[str, str]) -> dict[str, str]:
    """Return a description of each tensor for error messages, by name, given what `InPlaceReduction.same` has."""
    return {
        name: describe(tensor) + (f" in the memory of {same[name]}" if name in same else "")
        for name, tensor in zip(names, tensors, strict=True)
    }
