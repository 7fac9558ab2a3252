"""A drop-in for `ignite.distributed`: `import rankwise.compat.ignite as idist`.

Names, signatures, results and the behavior in a single process are those of PyTorch-Ignite 0.5. docs/migrate.md lists
the faults of the original that this module does not have. `install()` replaces the original for Ignite's own engine,
metrics and handlers too.
"""

from __future__ import annotations

import sys
from types import ModuleType

from rankwise import hostname
from rankwise.compat.ignite._identity import set_local_rank, sync
from rankwise.compat.ignite._initialize import finalize, initialize
from rankwise.compat.ignite._install import install
from rankwise.compat.ignite._models import (
    available_backends,
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
    registered_computation_models,
)
from rankwise.compat.ignite._one_rank import one_rank_first, one_rank_only
from rankwise.compat.ignite._operations import (
    all_gather,
    all_gather_tensors_with_shapes,
    all_reduce,
    barrier,
    broadcast,
)
from rankwise.compat.ignite._parallel import Parallel
from rankwise.compat.ignite._queries import (
    backend,
    device,
    get_local_rank,
    get_nnodes,
    get_node_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    model_name,
    show_config,
)
from rankwise.compat.ignite._sampler import DistributedProxySampler
from rankwise.compat.ignite._spawn import spawn
from rankwise.compat.ignite._subgroups import new_group
from rankwise.compat.ignite.auto import auto_dataloader, auto_model, auto_optim

__all__ = [
    "DistributedProxySampler",
    "Parallel",
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "device",
    "finalize",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "hostname",
    "initialize",
    "install",
    "model_name",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "registered_computation_models",
    "set_local_rank",
    "show_config",
    "spawn",
    "sync",
]


def __getattr__(name: str) -> ModuleType:
    if name in {"auto", "comp_models", "launcher", "utils"}:  # modules of the original; this one has all their names
        return sys.modules[__name__]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
