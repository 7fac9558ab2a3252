"""Models, data loaders and optimizers adapted to the world: the same program runs alone and with several ranks."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

import rankwise
from rankwise.compat.ignite import _xla_training
from rankwise.compat.ignite._identity import joined_session
from rankwise.compat.ignite._logging import log_on_rank_zero
from rankwise.compat.ignite._model_backends import XLA
from rankwise.compat.ignite._queries import device, get_nproc_per_node, get_rank, get_world_size, model_name
from rankwise.compat.ignite._sampler import DistributedProxySampler
from rankwise.errors import InvalidArgumentError

__all__ = ["DistributedProxySampler", "auto_dataloader", "auto_model", "auto_optim"]

_XLADistributedOptimizer = _xla_training.AveragingOptimizer

_LOADER: Final = "auto.auto_dataloader"
_MODEL: Final = "auto.auto_model"


def auto_dataloader(dataset: Dataset[Any], **kwargs: Any) -> DataLoader[Any]:  # noqa: ANN401 - Ignite's signature
    """Return a data loader that gives every rank its share of a dataset.

    Local. `batch_size` is divided among the ranks of the world, and `num_workers` among those of the node; a warning is
    logged for a batch size that does not divide. A sampler is wrapped in a `DistributedProxySampler`; without one,
    torch's `DistributedSampler` is used, and shuffles unless `shuffle=False`. With several ranks on XLA devices it is
    a loader of torch_xla, which transfers the batches to the device of this rank.

    Args:
        dataset: The dataset. An iterable one has to give each rank its own part itself.
        kwargs: Arguments of `torch.utils.data.DataLoader`.

    Example:
        >>> [batch.tolist() for batch in auto_dataloader(range(3), batch_size=2)]
        [[0, 1], [2]]
    """
    world_size = get_world_size()
    if world_size > 1:
        batch_size = kwargs.get("batch_size")
        if batch_size is not None and batch_size >= world_size:
            kwargs["batch_size"] = _divided(batch_size, world_size)
        if kwargs.get("num_workers"):
            nproc = get_nproc_per_node()
            if kwargs["num_workers"] >= nproc:
                kwargs["num_workers"] = -(-kwargs["num_workers"] // nproc)
        if "batch_sampler" in kwargs:
            warnings.warn(
                "Found batch_sampler in provided kwargs: it is used as it is, so each rank has to draw its own share",
                stacklevel=2,
            )
        elif isinstance(dataset, IterableDataset):
            log_on_rank_zero(
                _LOADER, "Found iterable dataset, which is not shared out: each rank has to read another part of it"
            )
        else:
            _set_sampler(dataset, kwargs, world_size)
    is_xla = model_name() == XLA
    if is_xla and kwargs.get("pin_memory"):
        warnings.warn(
            "Found incompatible options: xla support and pin_memory args equal True: pin_memory=False is used",
            stacklevel=2,
        )
        kwargs["pin_memory"] = False
    kwargs.setdefault("pin_memory", not is_xla and device().type == "cuda")
    log_on_rank_zero(_LOADER, "Use data loader kwargs for dataset '%s': \n\t%s", repr(dataset)[:20].strip(), kwargs)
    loader: DataLoader[Any] = DataLoader(dataset, **kwargs)
    return _xla_training.loader_to_device(loader) if is_xla and world_size > 1 else loader


def auto_model(model: nn.Module, sync_bn: bool = False, **kwargs: Any) -> nn.Module:  # noqa: ANN401 - Ignite's signature
    """Return a model on this rank's device, wrapped in DistributedDataParallel if there are several ranks.

    Collective over the world if there are several ranks. Alone with several GPUs, it is wrapped in DataParallel. On XLA
    devices it is not wrapped: it gets the parameters of rank zero, and `auto_optim` averages the gradients.

    Args:
        model: The model; it is moved in place.
        sync_bn: Replace batch norm by batch norm over all ranks; ignored on XLA devices, with a warning in the log.
        kwargs: Arguments of the wrapping class, except `device_ids` on an accelerator, which is set here.

    Raises:
        InvalidArgumentError: `device_ids` is passed, and the model is on an accelerator.

    Example:
        >>> auto_model(nn.Identity())
        Identity()
    """
    own = device()
    if any(parameter.device != own for parameter in model.parameters()):
        model.to(own)
    if model_name() == XLA:
        if sync_bn:
            log_on_rank_zero(_MODEL, "sync_bn is ignored: torch has none for XLA devices", level=logging.WARNING)
        if joined_session() is not None:
            rankwise.sync_params(model)
        return model
    if get_world_size() > 1:
        if sync_bn:
            log_on_rank_zero(_MODEL, "Convert batch norm to sync batch norm")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if own.type != "cpu":
            if "device_ids" in kwargs:
                raise InvalidArgumentError(
                    f"Argument kwargs should not contain 'device_ids', but got {kwargs['device_ids']!r}: leave it out, "
                    "it is this rank's device"
                )
            # The device itself: with one visible GPU for each rank, its index is not the local rank.
            kwargs["device_ids"] = [own]
        log_on_rank_zero(_MODEL, "Apply torch DistributedDataParallel on model, device: %s", own)
        return DistributedDataParallel(model, **kwargs)
    if own.type == "cuda" and torch.cuda.device_count() > 1:
        log_on_rank_zero(_MODEL, "Apply torch DataParallel on model")
        return DataParallel(model, **kwargs)
    return model


def auto_optim(optimizer: Optimizer, **kwargs: Any) -> Optimizer:  # noqa: ANN401, ARG001 - Ignite's signature
    """Return the optimizer unchanged, and on XLA devices one that averages the gradients over the ranks in each step.

    Local. That one has the class of the optimizer, its parameters and its state, and replaces it. Its steps are
    collective; they start the execution on the device.

    Args:
        optimizer: Any optimizer, made after `auto_model`.
        kwargs: Arguments of Horovod's optimizer; ignored.
    """
    return _xla_training.averaging(optimizer) if model_name() == XLA else optimizer


def __getattr__(name: str) -> type[DataLoader[Any]]:
    if name == "_MpDeviceLoader":
        return _xla_training.loader_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _divided(batch_size: int, world_size: int) -> int:
    share = batch_size // world_size
    if share * world_size != batch_size:
        log_on_rank_zero(
            _LOADER,
            "batch_size=%d does not divide among %d ranks: with %d each, %d are trained on at a time",
            batch_size,
            world_size,
            share,
            share * world_size,
            level=logging.WARNING,
        )
    return share


def _set_sampler(dataset: Dataset[Any], kwargs: dict[str, Any], world_size: int) -> None:
    sampler, rank = kwargs.get("sampler"), get_rank()
    if isinstance(sampler, DistributedSampler):
        if sampler.rank != rank:
            warnings.warn(
                f"Found distributed sampler with rank={sampler.rank}, but process rank is {rank}", stacklevel=3
            )
        if sampler.num_replicas != world_size:
            warnings.warn(
                f"Found distributed sampler with num_replicas={sampler.num_replicas}, but world size is {world_size}",
                stacklevel=3,
            )
    elif sampler is None:
        shuffle = kwargs.pop("shuffle", True)
        kwargs["sampler"] = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
    else:
        kwargs["sampler"] = DistributedProxySampler(sampler, num_replicas=world_size, rank=rank)
