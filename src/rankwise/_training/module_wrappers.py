"""Modules that average gradients themselves, those of DDP and FSDP; and making one of DDP."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from rankwise._collectives.pytree import describe
from rankwise._session.current import default_group, joined_session
from rankwise._torch import uncompiled
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import InvalidArgumentError, NotJoinedError

# The classes whose ranks have parts of the parameters, by the package that defines them: FSDP 1 and 2, and torch_xla's.
# Where a package is not imported, there is no such module.
_SHARDING: Final = {
    "torch.distributed.fsdp": ("FullyShardedDataParallel", "FSDPModule"),
    "torch_xla.distributed.fsdp": ("XlaFullyShardedDataParallel",),
}


def wrapper_of(module: torch.nn.Module) -> str:
    """Return the name of the class that a module is wrapped by, also if it is compiled; "" if there is none."""
    return "DistributedDataParallel" if isinstance(uncompiled(module), DistributedDataParallel) else _sharded_by(module)


def _sharded_by(module: torch.nn.Module) -> str:
    """Return the name of the class that has sharded a module, or one in it; "" if there is none."""
    loaded = [(sys.modules.get(home), name) for home, names in _SHARDING.items() for name in names]
    classes = {getattr(home, name): name for home, name in loaded if hasattr(home, name)}
    if not classes:  # the usual case, without the walk
        return ""
    kinds = tuple(classes)
    found = next((part for part in module.modules() if isinstance(part, kinds)), None)
    return next((name for kind, name in classes.items() if isinstance(found, kind)), "")


def refuse_fsdp(module: torch.nn.Module, caller: str) -> None:
    """Check that there is no module of FSDP in a module: each rank has other parts of the parameters.

    Raises:
        InvalidArgumentError: There is one.
    """
    if kind := _sharded_by(module):
        raise InvalidArgumentError(
            f"{caller} got a module of {kind}, of whose parameters each rank has a part: call {caller} before the "
            "module is wrapped"
        )


def refuse_wrappers(module: torch.nn.Module, caller: str) -> None:
    """Check that a module does not average gradients itself.

    Raises:
        InvalidArgumentError: It does.
    """
    if kind := wrapper_of(module):
        raise InvalidArgumentError(
            f"{caller} got a module of {kind}, which averages gradients itself, in backward(): leave {caller} out, or "
            "pass a module that is not wrapped"
        )


def wrap_ddp(module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:  # noqa: ANN401 - those of DDP
    """Return a module in `DistributedDataParallel`, with the right `device_ids`; in a world of one too.

    Collective over the session. The wrapper and the names in its `state_dict()` are the same with any number of ranks.
    `device_ids` is the device of the parameters if they are on one accelerator, whatever its index among those that the
    process sees; and None on the CPU, and for a module on several devices.

    Args:
        module: The module, on its device; the same on all ranks.
        **kwargs: Arguments of `DistributedDataParallel`.

    Raises:
        InvalidArgumentError: `module` is not a module, or is wrapped already, or is on an XLA device; or DDP has no
            such argument.
        RemoteRankError: This error occurred on another rank.
        MismatchError: The parameters differ in name, shape or dtype, or another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: There is no process group: call `rankwise.init()` before.

    Example:
        >>> import rankwise, torch
        >>> with rankwise.init():
        ...     list(wrap_ddp(torch.nn.Linear(2, 1)).state_dict())
        ['module.weight', 'module.bias']
    """
    comm = joined_session().comm
    with comm.call("wrap_ddp") as call:
        if not isinstance(module, torch.nn.Module):
            raise InvalidArgumentError(f"wrap_ddp takes a module, got {describe(module)}")
        if kind := wrapper_of(module):
            raise InvalidArgumentError(f"wrap_ddp got a module of {kind}: it is wrapped already")
        described = {name: describe(parameter) for name, parameter in uncompiled(module).named_parameters()}
        call.content, call.parts = str(described), lambda: described
        devices = {parameter.device for parameter in module.parameters()}
        if any(device.type == DEVICE_TYPE for device in devices):
            raise InvalidArgumentError("wrap_ddp got a module on an XLA device, where DDP does not run: use sync_grads")
        if unknown := kwargs.keys() - inspect.signature(DistributedDataParallel).parameters.keys():
            raise InvalidArgumentError(f"DistributedDataParallel has no argument {min(unknown)!r}")
        if default_group() is None:
            raise NotJoinedError("wrap_ddp needs a process group: call rankwise.init() before it")
        call.verify()
    return DistributedDataParallel(module, **{"device_ids": _device_ids(devices), **kwargs})


@contextmanager
def no_sync(module: torch.nn.Module) -> Iterator[None]:
    """Accumulate gradients in a block, without their reduction in backward(), of a module of DDP or FSDP.

    Local. For all but the last backward() of a step. For a module without a wrapper it has no effect.

    Args:
        module: A module, wrapped or not, compiled or not.

    Raises:
        InvalidArgumentError: `module` is not a module.

    Example:
        >>> import rankwise, torch
        >>> with rankwise.init():
        ...     model = wrap_ddp(torch.nn.Linear(2, 1))
        ...     with no_sync(model):
        ...         model(torch.ones(3, 2)).sum().backward()
        ...     model(torch.ones(3, 2)).sum().backward()
        >>> next(model.parameters()).grad
        tensor([[6., 6.]])
    """
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgumentError(f"no_sync takes a module, got {describe(module)}")
    wrapped: Any = uncompiled(module)
    kind = wrapper_of(module)
    if kind == "FSDPModule":
        parts = [part for part in wrapped.modules() if hasattr(part, "set_requires_gradient_sync")]
        for part in parts:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_requires_gradient_sync(True, recurse=False)
    else:
        with wrapped.no_sync() if kind and hasattr(wrapped, "no_sync") else nullcontext():
            yield


def _device_ids(devices: set[torch.device]) -> list[torch.device] | None:
    """Return the `device_ids` of DDP for a module with parameters on some devices."""
    return list(devices) if len(devices) == 1 and all(device.type != "cpu" for device in devices) else None
