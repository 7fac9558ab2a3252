"""Ignite's computation models, as views of the session in force."""

from __future__ import annotations

from typing import Final

from rankwise.compat.ignite._model_backends import has_hvd_support, has_native_dist_support, has_xla_support
from rankwise.compat.ignite._queries import model_name
from rankwise.compat.ignite.comp_models.base import ComputationModel, _SerialModel
from rankwise.compat.ignite.comp_models.horovod import _HorovodDistModel
from rankwise.compat.ignite.comp_models.native import _NativeDistModel
from rankwise.compat.ignite.comp_models.xla import _XlaDistModel

__all__ = [
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "model_in_force",
    "registered_computation_models",
    "setup_available_computation_models",
]


def setup_available_computation_models() -> tuple[type[ComputationModel], ...]:
    """Return the models that this host can use.

    Local.
    """
    supported = {
        _SerialModel: True,
        _NativeDistModel: has_native_dist_support,
        _XlaDistModel: has_xla_support,
        _HorovodDistModel: has_hvd_support,
    }
    return tuple(model for model, is_supported in supported.items() if is_supported)


registered_computation_models: Final = setup_available_computation_models()


def model_in_force() -> ComputationModel:
    """Return the view of the session in force; without one, that of a process alone.

    Local.

    Example:
        >>> model_in_force().get_world_size()
        1
    """
    name = model_name()
    return next(model for model in registered_computation_models if model.name == name)()
