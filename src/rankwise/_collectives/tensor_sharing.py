"""Tensors in memory that all members of a group have mapped, as gradients that are reduced where they are."""

from __future__ import annotations

import pickle

import torch

from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.data.shared_tensor import SharedTensor


def shared_tensor(comm: Comm, dtype: torch.dtype, numel: int) -> SharedTensor | None:
    """Return a tensor in memory that all members have mapped; None on all of them where it cannot be had.

    Collective over the members. There is none in a group of one rank, of ranks on several hosts, or without shared
    memory, and none if any member lacks memory.

    Args:
        comm: The group.
        dtype: The dtype, the same on all members.
        numel: The number of elements, the same on all members.

    Raises:
        MismatchError: The dtypes or sizes differ.
        CollectiveError: A member is gone.
    """
    call = Call("the memory of a shared tensor", {"dtype": str(dtype), "numel": numel}, is_data=True)
    with comm.collective(call) as own:
        comm.verify(call)  # the members are connected after it
        memory = comm.shared_memory if numel else None
        if memory is None:
            return None
        call.begin_data()
        offset = memory.reserve_tensors(dtype, numel) if own == 0 else None
        offset = pickle.loads(comm.broadcast_bytes(call, pickle.dumps(offset), 0))
        call.begin_data()
        shared = None if offset is None else memory.map_tensor(offset, dtype, numel)
        is_mapped = all(comm.all_gather_bytes(call, b"" if shared is None else b"+"))
    return shared if is_mapped else None
