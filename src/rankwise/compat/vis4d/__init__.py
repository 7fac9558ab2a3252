"""A drop-in for `vis4d.common.distributed`: `from rankwise.compat import vis4d as distributed`.

Rank and world size come from one source, before and after joining; collectives are no-ops alone.
"""

from __future__ import annotations

from rankwise.compat.vis4d._folders import create_tmpdir
from rankwise.compat.vis4d._objects import (
    UnsupportedBackendError,
    all_gather_object_cpu,
    all_gather_object_gpu,
    broadcast,
    obj2tensor,
    pad_to_largest_tensor,
    serialize_to_tensor,
    tensor2obj,
)
from rankwise.compat.vis4d._ranks import (
    distributed_available,
    get_local_rank,
    get_rank,
    get_world_size,
    rank_zero_only,
    synchronize,
)
from rankwise.compat.vis4d._tensors import all_reduce_dict, is_module_wrapper, reduce_mean

__all__ = [
    "UnsupportedBackendError",
    "all_gather_object_cpu",
    "all_gather_object_gpu",
    "all_reduce_dict",
    "broadcast",
    "create_tmpdir",
    "distributed_available",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "is_module_wrapper",
    "obj2tensor",
    "pad_to_largest_tensor",
    "rank_zero_only",
    "reduce_mean",
    "serialize_to_tensor",
    "synchronize",
    "tensor2obj",
]
