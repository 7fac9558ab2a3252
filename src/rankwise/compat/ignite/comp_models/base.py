"""Views of the session in force, with the names of Ignite's models; and the one of a process alone.

A view has no state, and no collectives of its own: its methods are the functions of this package, which look up the
session at each call.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch

from rankwise.compat.ignite import _initialize, _operations, _queries, _spawn, _subgroups
from rankwise.compat.ignite._model_backends import SERIAL, usable_backends
from rankwise.errors import InvalidArgumentError

_torch_version_gt_112: Final = True  # rankwise requires a newer one


class _UsableBackends:
    """The backends of a model that this host can use: looked up when they are read, for a GPU may be hidden later."""

    def __get__(self, _: object, model: type[ComputationModel]) -> tuple[str, ...]:
        return usable_backends(model.name)


class ComputationModel:
    """A view of the session in force.

    Attributes:
        name: The name that `model_name()` returns.
        available_backends: The backends that `initialize()` takes on this host.
    """

    name: str
    available_backends = _UsableBackends()

    def __init__(self, backend: str | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - Ignite's signature
        if backend is not None:
            self._check_backend(backend)
            _initialize.join(backend, kwargs)

    @classmethod
    def create_from_context(cls) -> ComputationModel | None:
        """Return the view of the session in force; None if it belongs to another model. Local."""
        return cls() if _queries.model_name() == cls.name else None

    @classmethod
    def create_from_backend(cls, backend: str, **kwargs: Any) -> ComputationModel:  # noqa: ANN401 - Ignite's signature
        """Join as `initialize` does, and return the view. Collective over the world."""
        return cls(backend, **kwargs)

    @classmethod
    def spawn(cls, fn: Any, args: Any, kwargs_dict: Any = None, nproc_per_node: int = 1, **kwargs: Any) -> None:  # noqa: ANN401 - Ignite's signature
        """Run a function in new ranks, as `spawn(backend, ...)` does."""
        backend = kwargs.pop("backend", None) or next(iter(cls.available_backends), cls.name)
        cls._check_backend(backend)
        _spawn.spawn(backend, fn, args, kwargs_dict, nproc_per_node, **kwargs)

    @classmethod
    def _check_backend(cls, backend: object) -> None:
        if backend not in cls.available_backends:
            raise InvalidArgumentError(f"Backend should be one of '{cls.available_backends}', got {backend!r}")

    get_local_rank = staticmethod(_queries.get_local_rank)
    get_rank = staticmethod(_queries.get_rank)
    get_world_size = staticmethod(_queries.get_world_size)
    get_nproc_per_node = staticmethod(_queries.get_nproc_per_node)
    get_nnodes = staticmethod(_queries.get_nnodes)
    get_node_rank = staticmethod(_queries.get_node_rank)
    device = staticmethod(_queries.device)
    backend = staticmethod(_queries.backend)
    finalize = staticmethod(_initialize.finalize)
    all_reduce = _do_all_reduce = staticmethod(_operations.all_reduce)
    all_gather = _do_all_gather = _do_all_gather_object = staticmethod(_operations.all_gather)
    broadcast = _do_broadcast = staticmethod(_operations.broadcast)
    new_group = _do_new_group = staticmethod(_subgroups.new_group)
    barrier = staticmethod(_operations.barrier)
    _rank_not_in_group = staticmethod(_subgroups.rank_not_in_group)

    @property
    def _init_method(self) -> str | None:
        return _initialize.init_method_in_force()

    def _get_max_length(self, x: str, _: torch.device | str) -> int:
        longest: int = self.all_reduce(len(x), "MAX")
        return longest


class _SerialModel(ComputationModel):
    """The view of a process alone. One that is made while a session is open has the numbers of that."""

    name = SERIAL

    def __init__(self, _backend: str | None = None, **_: Any) -> None:  # noqa: ANN401 - Ignite's signature
        super().__init__()

    @classmethod
    def create_from_context(cls) -> _SerialModel:
        return cls()

    @classmethod
    def create_from_backend(cls, backend: str | None = None, **kwargs: Any) -> _SerialModel:  # noqa: ANN401, ARG003 - Ignite's signature
        return cls()

    @classmethod
    def spawn(cls, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401 - Ignite's signature
        raise NotImplementedError("Serial computation model does not implement spawn method: name a backend")
