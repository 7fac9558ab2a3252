"""Devices of torch_xla: that of a rank, and data loaders and optimizers for it. Calls import torch_xla."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import rankwise
from rankwise.compat.ignite._identity import joined_session


def own_device() -> torch.device:
    """Return the XLA device of this rank.

    Local.
    """
    return cast("torch.device", importlib.import_module("torch_xla").device())


def loader_class() -> type[DataLoader[Any]]:
    """Return the class of torch_xla whose objects transfer the batches of a data loader to a device.

    Local.
    """
    return cast(
        "type[DataLoader[Any]]", importlib.import_module("torch_xla.distributed.parallel_loader").MpDeviceLoader
    )


def loader_to_device(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return an iterable over the batches of a data loader on this rank's device. It has the loader's sampler.

    Local.
    """
    transferring: Any = loader_class()(loader, own_device())  # type: ignore[arg-type]  # declared as a data loader
    transferring.sampler = loader.sampler
    return cast("DataLoader[Any]", transferring)


class AveragingOptimizer(Optimizer):
    """Averages the gradients over the ranks before each step, and starts to execute the step on the device.

    It is mixed into the class of an optimizer by `averaging`.

    Attributes:
        wrapped_optimizer: The optimizer that this one was made of.
    """

    wrapped_optimizer: Optimizer

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - torch's signature
        """Make a step with the gradients' means. Collective over the world."""
        if closure is None:
            self._average()
            loss = super().step()
        else:
            loss = super().step(functools.partial(self._averaged, closure))
        importlib.import_module("torch_xla").sync()
        return loss

    def _averaged(self, closure: Callable[[], Any]) -> Any:  # noqa: ANN401 - the user's
        loss = closure()
        self._average()
        return loss

    def _average(self) -> None:
        if joined_session() is not None:
            rankwise.sync_grads(parameter for group in self.param_groups for parameter in group["params"])


def averaging(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class that averages gradients. It shares parameters and state with the original.

    Local.
    """
    original = type(optimizer)
    adapted: Optimizer = object.__new__(type(original.__name__, (AveragingOptimizer, original), {}))
    adapted.__dict__.update(optimizer.__dict__, wrapped_optimizer=optimizer)
    adapted.__dict__.pop("step", None)  # a scheduler that was made before has set the original's
    return adapted
