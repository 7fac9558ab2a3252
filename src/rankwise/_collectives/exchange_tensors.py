"""Tensors sent from any members of a group to any others, for collectives of other packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rankwise._collectives.pytree import describe
from rankwise._comm.buffers import as_bytes, device_of_bytes, from_bytes
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call, Move
from rankwise._comm.data.planes import all_of
from rankwise._comm.dense_tensors import dense
from rankwise._comm.group_rank import GroupRank
from rankwise.errors import InvalidArgumentError, PayloadTypeError, shown


@dataclass(frozen=True, slots=True)
class _Header:
    """A tensor on its way to a member: what the receiver has to know."""

    dst: int
    dtype: str
    shape: tuple[int, ...]
    device: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def empty(self, comm: Comm) -> torch.Tensor:
        """Return a flat tensor for its bytes: on this rank's accelerator, if it is on one, otherwise on the CPU."""
        nbytes = self.torch_dtype.itemsize
        for length in self.shape:
            nbytes *= length
        return torch.empty(nbytes, dtype=torch.uint8, device=device_of_bytes(comm.device, self.device))

    def tensor(self, data: torch.Tensor, comm: Comm) -> torch.Tensor:
        """Return the tensor with these bytes."""
        tensor = from_bytes(data, self.torch_dtype, self.shape)
        return tensor.to(comm.device) if self.device == comm.device.type else tensor


def exchange_tensors(
    comm: Comm, call: Call, outgoing: Mapping[int | GroupRank, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Send tensors to members, and return those that members sent to this one, both by global rank.

    Collective over the members. The first agreement carries the shapes, so that each member allocates what it receives;
    the second one follows when all have done so.

    Raises:
        InvalidArgumentError: `outgoing` is not a mapping, or a key of it is not a member.
        PayloadTypeError: A value of it is not a dense tensor.
    """
    with call:
        rank = call.rank
        sent = _checked(comm, outgoing)
        headers = [
            (dst, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type)
            for dst, tensor in sent.items()
        ]
        messages = call.all_gather(json.dumps(headers).encode())
        table = [
            [_Header(dst, dtype, tuple(shape), device) for dst, dtype, shape, device in json.loads(m)] for m in messages
        ]
        received = [(src, header) for src, row in enumerate(table) for header in row if header.dst == rank]
        parts: dict[int, torch.Tensor] = {}

        def prepare() -> Move:
            for src, header in received:
                parts[src] = as_bytes(sent[rank]).clone() if src == rank else header.empty(comm)
            moves = []
            for device in sorted({header.device for row in table for header in row}):
                here = [(as_bytes(tensor), dst) for dst, tensor in sent.items() if tensor.device.type == device]
                there = [(parts[src], src) for src, header in received if header.device == device and src != rank]
                moves.append(comm.planes.transfer([move for move in here if move[1] != rank], there))
            return all_of(moves)

        call.run_prepared(prepare)
    return {comm.ranks[src]: header.tensor(parts[src], comm) for src, header in received}


def _checked(comm: Comm, outgoing: Mapping[int | GroupRank, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the tensors by group rank."""
    if not isinstance(outgoing, Mapping):
        raise InvalidArgumentError(f"exchange takes a mapping of ranks to tensors, got {shown(outgoing)}")
    sent = {}
    for dst, tensor in outgoing.items():
        if not isinstance(tensor, torch.Tensor):
            raise PayloadTypeError(f"exchange sends tensors, got {describe(tensor)} for rank {shown(dst)}")
        sent[comm.group_rank_of(dst, "a rank of exchange")] = dense(tensor)
    return sent
