"""A drop-in for `ignite.distributed`: `import rankwise.compat.ignite as idist`.

Names, signatures, results and the behavior in a single process are those of PyTorch-Ignite 0.5. docs/migrate.md lists
the faults of the original that this module does not have. `install()` replaces the original for Ignite's own engine,
metrics and handlers too.
"""

from __future__ import annotations

from rankwise.compat.ignite import auto as auto
from rankwise.compat.ignite import comp_models as comp_models
from rankwise.compat.ignite import launcher as launcher
from rankwise.compat.ignite import utils as utils
from rankwise.compat.ignite._install import install
from rankwise.compat.ignite.auto import DistributedProxySampler, auto_dataloader, auto_model, auto_optim
from rankwise.compat.ignite.launcher import Parallel
from rankwise.compat.ignite.utils import (
    all_gather,
    all_gather_tensors_with_shapes,
    all_reduce,
    available_backends,
    backend,
    barrier,
    broadcast,
    device,
    finalize,
    get_local_rank,
    get_nnodes,
    get_node_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
    hostname,
    initialize,
    model_name,
    new_group,
    one_rank_first,
    one_rank_only,
    registered_computation_models,
    set_local_rank,
    show_config,
    spawn,
    sync,
)

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
