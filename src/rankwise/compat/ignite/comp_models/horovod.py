"""Ignite's model for Horovod, which rankwise does not support: each use is an error that names the replacement."""

from __future__ import annotations

from typing import Any, NoReturn

from rankwise.compat.ignite._model_backends import HOROVOD, NO_HOROVOD, has_hvd_support
from rankwise.compat.ignite.comp_models.base import ComputationModel
from rankwise.errors import InvalidArgumentError

__all__ = ["HOROVOD", "_HorovodDistModel", "has_hvd_support"]


class _HorovodDistModel(ComputationModel):
    """A class for type hints: there are no objects of it."""

    name = "horovod-dist"

    def __init__(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - Ignite's signature
        raise InvalidArgumentError(NO_HOROVOD)

    @classmethod
    def spawn(cls, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401 - Ignite's signature
        raise InvalidArgumentError(NO_HOROVOD)
