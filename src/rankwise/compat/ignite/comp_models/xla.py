"""Ignite's model for devices of torch_xla. Importing this module does not import torch_xla."""

from __future__ import annotations

from rankwise.compat.ignite._model_backends import XLA, XLA_TPU, has_xla_support
from rankwise.compat.ignite.comp_models.base import ComputationModel

__all__ = ["XLA_TPU", "_XlaDistModel", "has_xla_support"]


class _XlaDistModel(ComputationModel):
    """The view of a session on XLA devices. It has no backends where torch_xla is not installed."""

    name = XLA
