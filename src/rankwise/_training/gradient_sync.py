"""One synchronization of gradients: agreement of the ranks on which there are, and their reduction where they are.

The gradient of a parameter may be None, dense or sparse, and may differ in that between ranks. So ranks exchange one
byte for each parameter, unless all of their gradients are dense, and their weights, in the frames by which they agree
on the call. Sparse gradients are gathered.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import torch

from rankwise._collectives.all_gather import all_gather
from rankwise._collectives.in_place import InPlaceReduction, Place, described, descriptions
from rankwise._comm.buffers import is_expanded, overwrite
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call
from rankwise._comm.dense_tensors import common_place, dense
from rankwise._comm.group import Group
from rankwise._comm.reduce_ops import Op, plan
from rankwise._text import ranks_text
from rankwise.errors import CollectiveError

# Bits for the gradient of a parameter on one rank, or, combined with OR, on several.
_MISSING: Final = 1
_DENSE: Final = 2
_SPARSE: Final = 4

# Before the kinds, the weight of a rank, or the sum of all.
_WEIGHT: Final = struct.Struct("<d")

_SPARSE_LAYOUTS: Final = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_MOST_NAMES: Final = 5


@dataclass(slots=True)
class GradientSync:
    """One call of `sync_grads`.

    Attributes:
        comm: The group.
        call: The call.
        op: The reduction, a sum or a mean.
        weight: What the gradients of this rank count in a mean; None if all count the same.
        needs_all: Whether a missing gradient is an error.
        parameters: The parameters with gradients, each once.
        names: Returns their names.
    """

    comm: Comm
    call: Call
    op: Op
    weight: float | None
    needs_all: bool
    parameters: Sequence[torch.Tensor]
    names: Callable[[], Sequence[str]]
    # By parameter, what is reduced for it: its gradient, zeros in place of a missing one; and the kind of that.
    _grads: list[torch.Tensor] = field(default_factory=list)
    _kinds: list[int] = field(default_factory=list)
    # The indices of parameters that get a new gradient, if any rank has one.
    _new: list[int] = field(default_factory=list)
    # After the exchange: the reduction, and the kinds of the gradients of all ranks; none if all are dense everywhere.
    _reduced: InPlaceReduction = field(init=False)
    _combined: bytes = b""

    def exchange(self, title: str) -> None:
        """Agree on the call and reduce the gradients, in the block of a call; `finish` follows it.

        Args:
            title: What has to be the same on all ranks beside the gradients: the names, if the parameters have any.
        """
        # A rank knows its own gradients alone, and must prepare the reduction before it knows those of the others. It
        # takes the usual case for granted, that every rank has dense gradients, or zeros, where it has them:
        # parameters, shapes and dtypes are compared by the agreement itself. In the same frames the kinds travel
        # (`_MISSING`, `_DENSE`, `_SPARSE`, combined with OR), or nothing if all of a rank's are dense. Then three
        # cases:
        # - All have all gradients, and all are dense: what was prepared is right.
        # - Some are missing somewhere: zeros stood for them, so it is right too; a parameter that any rank has a
        #   gradient for gets a new one where it has none. With missing="error" all ranks know it, and raise the same.
        # - One is sparse on some ranks alone: these have left it out of their reduction, and the others have not. All
        #   know it from the kinds, prepare again without it, and agree once more. Sparse gradients are gathered at the
        #   end, when nothing of this call is pending any more.
        place = self._collect()
        reduction = self._reduction(self._kinds, place)
        self.call.content = f"{title} {described(self._grads, place)} {reduction.same}"
        self.call.parts = lambda: descriptions(self.names(), self._grads, reduction.same)
        note = reduction.agree(self.call, _WEIGHT.pack(self._own_weight) + bytes(self._kinds), _combined)
        (total_weight,), combined = _WEIGHT.unpack_from(note), note[_WEIGHT.size :]
        if combined or self._new:  # otherwise all have all gradients, and these are dense
            reduction = self._agreed_on_kinds(reduction, combined or bytes([_DENSE]) * len(self._grads))
        reduction.run()
        reduction.total_weight = total_weight
        self._reduced = reduction

    @property
    def _own_weight(self) -> float:
        return 1.0 if self.weight is None else self.weight

    def _agreed_on_kinds(self, reduction: InPlaceReduction, combined: bytes) -> InPlaceReduction:
        """Return the reduction of what is dense on all ranks, given the kinds of the gradients of all.

        Raises:
            CollectiveError: A gradient is missing, and `needs_all`.
        """
        self._combined = combined
        if self.needs_all and any(kind & _MISSING for kind in combined):
            self._raise_missing()
        if any(kind & _SPARSE and kind != _SPARSE for kind in combined):
            # Of what is sparse on some ranks alone, the others have prepared the reduction with that of all else.
            self.call.begin_data()
            reduction = self._reduction(combined, None)
            reduction.agree(self.call)
        return reduction

    def finish(self) -> None:
        """Give the parameters their gradients, after the block. Collective over the members, if some are sparse."""
        kinds = self._combined
        if kinds:  # first, since the others wait for this rank there; to finish the reduction may allocate memory
            sparse = [one for one, kind in zip(self.parameters, kinds, strict=True) if kind & _SPARSE]
            reduce_sparse(self.comm, sparse, self.op, self._own_weight)
        self._reduced.finish()
        for index in self._new:
            if kinds[index] & _DENSE and not kinds[index] & _SPARSE:
                self.parameters[index].grad = self._grads[index]

    def _collect(self) -> Place | None:
        """Take note of what is reduced for each parameter, and return its `common_place`; no kinds if it is as usual.

        Raises:
            PayloadTypeError: A parameter has no gradient that could be averaged, and can have none.
        """
        grads = [parameter.grad for parameter in self.parameters]
        self._grads = [grad for grad in grads if grad is not None]
        if len(self._grads) == len(grads) and (place := common_place(self._grads)) is not None:
            return place
        self._grads = []
        for index, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            kind, reduced = _DENSE, grad
            if grad is None:
                kind, reduced = _MISSING, torch.zeros_like(dense(parameter), dtype=_gradient_type(parameter))
            elif grad.layout in _SPARSE_LAYOUTS:
                kind = _SPARSE
            elif is_expanded(plain := dense(grad)):
                reduced = plain.clone(memory_format=torch.contiguous_format)
            if reduced is not grad:
                self._new.append(index)
            self._kinds.append(kind)
            self._grads.append(reduced)  # type: ignore[arg-type]  # it is not None
        if self._kinds.count(_DENSE) == len(grads):
            self._kinds = []
        return None

    def _reduction(self, kinds: Sequence[int], place: Place | None) -> InPlaceReduction:
        """Return the reduction of the gradients that are not sparse."""
        indices = [index for index, kind in enumerate(kinds) if not kind & _SPARSE]
        grads = [self._grads[index] for index in indices] if kinds else self._grads

        def name(index: int) -> str:
            return self.names()[indices[index] if kinds else index]

        is_last = len(indices) == len(kinds)  # sparse gradients are gathered afterwards
        return InPlaceReduction(
            self.comm, grads, self.op, place=place, name=name, is_wide=True, is_last=is_last, weight=self.weight
        )

    def _raise_missing(self) -> NoReturn:
        """Raise, on all ranks, which gradients are missing on which ranks."""
        self.call.begin_data()
        kinds = self._kinds or [_DENSE] * len(self.parameters)
        found = self.call.all_gather(bytes(kinds))
        texts = []
        for name, of_ranks in zip(self.names(), zip(*found, strict=True), strict=True):
            ranks = [rank for rank, kind in zip(self.comm.ranks, of_ranks, strict=True) if kind == _MISSING]
            if ranks:
                texts.append(f"{name} on {ranks_text(ranks)}")
        more = f", and of {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
        text = (
            f"missing='error', and there is no gradient of {', '.join(texts[:_MOST_NAMES])}{more}: use the parameter "
            "in the loss on every rank, or pass missing='zeros'"
        )
        self.call.fail_everywhere(CollectiveError(text))


def _gradient_type(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the gradient that a parameter would get."""
    # Leaf tensors have this attribute, but not in torch 2.9, which torch_xla requires; None allows every dtype.
    return (getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None) or parameter.dtype


def _combined(notes: Sequence[bytes]) -> bytes:
    """Add the weights of all ranks, and combine their kinds with OR; no kinds stand for dense gradients alone."""
    total = _WEIGHT.pack(sum(_WEIGHT.unpack_from(note)[0] for note in notes))
    length = max(map(len, notes)) - _WEIGHT.size
    if not length:
        return total
    # As long integers, the bytes of all parameters are combined by one operation for each rank.
    kinds = [int.from_bytes(note[_WEIGHT.size :] or bytes([_DENSE]) * length, "little") for note in notes]
    return total + functools.reduce(operator.or_, kinds).to_bytes(length, "little")


def reduce_sparse(comm: Comm, parameters: Sequence[torch.Tensor], op: Op, weight: float) -> None:
    """Replace gradients that are sparse on some rank by their reductions, sparse unless a rank has a dense one.

    Collective over the members, if there are parameters.
    """
    if not parameters:
        return
    with comm.call("sync_grads", {"step": "sparse gradients"}):
        parts = [_parts(parameter.grad) for parameter in parameters]
    gathered, weights = zip(*all_gather((parts, weight), group=Group(comm)), strict=True)
    # From here on no other rank waits for this one, so that allocations may fail on this rank alone.
    for parameter, of_ranks in zip(parameters, zip(*gathered, strict=True), strict=True):
        grads = [
            (_from_parts(parts, parameter), own)
            for parts, own in zip(of_ranks, weights, strict=True)
            if parts is not None
        ]
        if not grads:
            continue
        dtype = grads[0][0].dtype
        wide = [(grad.to(plan(dtype, Op.MEAN).wire_dtype), own) for grad, own in grads]
        total = _sum([grad * own if own else torch.zeros_like(grad) for grad, own in wide])
        result = (total / ((sum(weights) or 1) if op.is_mean else 1)).to(dtype)
        own = parameter.grad
        if result.layout is torch.strided and own is not None and own.layout is torch.strided and not is_expanded(own):
            overwrite(own, result)
        else:
            parameter.grad = result if result.layout is torch.strided else result.coalesce()


def _parts(grad: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors of a gradient: indices and values of a sparse one, otherwise the gradient itself."""
    if grad is None:
        return None
    if grad.layout is torch.strided:
        return (dense(grad),)
    coalesced = (grad if grad.layout is torch.sparse_coo else grad.to_sparse()).detach().coalesce()
    return coalesced.indices(), coalesced.values()


def _from_parts(parts: tuple[torch.Tensor, ...], parameter: torch.Tensor) -> torch.Tensor:
    on_device = [part.to(parameter.device) for part in parts]
    return on_device[0] if len(on_device) == 1 else _sparse(on_device[0], on_device[1], parameter.shape)


def _sum(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of gradients in the order of ranks, so that all ranks get the same bits."""
    if any(grad.layout is torch.strided for grad in grads) or len({grad.sparse_dim() for grad in grads}) > 1:
        return functools.reduce(operator.add, (grad.to_dense() for grad in grads))
    indices = torch.cat([grad.indices() for grad in grads], dim=1)
    values = torch.cat([grad.values() for grad in grads])
    return _sparse(indices, values, grads[0].shape)


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # The device is named, or it would be torch's default one.
    return torch.sparse_coo_tensor(indices, values, shape, device=values.device, check_invariants=False).coalesce()
