"""The names of `ignite.distributed.utils`."""

from __future__ import annotations

from typing import Final

from rankwise import hostname
from rankwise.compat.ignite._identity import set_local_rank, sync
from rankwise.compat.ignite._initialize import check_backend, finalize, initialize
from rankwise.compat.ignite._model_backends import (
    available_backends,
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
)
from rankwise.compat.ignite._one_rank import one_rank_first, one_rank_only
from rankwise.compat.ignite._operations import (
    all_gather,
    all_gather_tensors_with_shapes,
    all_reduce,
    barrier,
    broadcast,
)
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
from rankwise.compat.ignite._spawn import spawn
from rankwise.compat.ignite._subgroups import new_group, rank_not_in_group
from rankwise.compat.ignite.comp_models import model_in_force, registered_computation_models
from rankwise.compat.ignite.comp_models.base import ComputationModel
from rankwise.compat.ignite.comp_models.base import _SerialModel as _SerialModel  # noqa: PLC0414 - exported
from rankwise.errors import PayloadTypeError

__all__ = [
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
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
# The session is looked up at each call.
_need_to_sync: Final = True
# Ignite's own tests import these from here.
_assert_backend: Final = check_backend
_rank_not_in_group: Final = rank_not_in_group


def _set_model(model: ComputationModel, temporary: bool = False) -> None:  # noqa: ARG001 - Ignite's signature
    """Check the model, and do nothing: models are views, and the session in force is looked up at each call. Local.

    Raises:
        PayloadTypeError: It is not a model.
    """
    if not isinstance(model, ComputationModel):
        raise PayloadTypeError(f"{model!r} is not a computation model")


def __getattr__(name: str) -> ComputationModel:
    if name == "_model":
        return model_in_force()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
