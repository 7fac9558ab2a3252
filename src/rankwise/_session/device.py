"""The device and the backend of a rank, from the devices that are visible to it."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

from rankwise._backends import BackendConfig
from rankwise._environment.facts import LaunchEnvironment
from rankwise._xla_use import DEVICE_TYPE, is_own_group, is_used
from rankwise.errors import InvalidArgumentError, JoinError, shown

# Torch lists these among its backends, but they transfer no data.
_PLACEHOLDERS: Final = frozenset({"undefined", "fake"})


def device_index(local_rank: int, visible: int) -> int:
    """Return the index of a local rank's device among the visible ones.

    Local. One visible device means that the launcher has assigned it (`--gpus-per-task=1`): index 0 on every rank.

    Raises:
        JoinError: There are several devices, but none for this rank.

    Example:
        >>> device_index(3, visible=8), device_index(3, visible=1)
        (3, 0)
    """
    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    raise JoinError(
        f"local rank {local_rank} has no device: {visible} are visible; start at most {visible} ranks on this host, "
        "make one device visible to each, or pass device='cpu'"
    )


def uses_xla(reading: LaunchEnvironment) -> bool:
    """Return whether a process uses its XLA device unless the caller decides otherwise.

    Ranks that torch_xla has started do, and processes alone that have used it. Libraries look for XLA devices where
    torch_xla is installed: ranks of another launcher are not converted by that.
    """
    return reading.launcher == "torch_xla" or (reading.world_size.value == 1 and is_used())


def is_xla(device: object) -> bool:
    """Return whether the argument of a function names an XLA device: as "xla", "xla:0", or a torch.device."""
    return isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == DEVICE_TYPE


def wants_xla(reading: LaunchEnvironment, backend: object, device: object) -> bool:
    """Return whether the arguments of `init()`, or what started this process, select XLA devices.

    Raises:
        InvalidArgumentError: torch_xla has started this rank, or opened its process group, but another backend or
            device is asked for.
    """
    named = is_xla(device) if backend is None else isinstance(backend, str) and backend == DEVICE_TYPE
    is_started = reading.launcher == "torch_xla"
    if is_started or is_own_group(dist.group.WORLD):
        if not named and (backend is not None or device is not None):
            done = "started this rank, with an XLA device" if is_started else "opened a process group, for XLA devices"
            raise InvalidArgumentError(
                f"backend={shown(backend)}, device={shown(device)}, but torch_xla has {done}: "
                "pass backend='xla', or neither; tensors on the CPU can be used in its collectives too"
            )
        return True
    if named and device is not None and not is_xla(device):
        raise InvalidArgumentError(f"backend={shown(backend)} has none for device={shown(device)}")
    return named or (backend is None and device is None and uses_xla(reading))


def inferred_device(reading: LaunchEnvironment) -> torch.device:
    """Return the device of a process that has not joined, which stays able to fork processes that use devices.

    Raises:
        JoinError: There are several devices, but none for this rank.
    """
    if uses_xla(reading):
        from rankwise._torch_xla import device  # noqa: PLC0415 - not needed without such devices

        found: torch.device = device()
        return found
    # For CUDA, `is_available` loads the driver, after which no forked process can use it; `device_count` does not.
    accelerator = torch.accelerator.current_accelerator()
    visible = 0 if accelerator is None else torch.get_device_module(accelerator).device_count()
    if accelerator is None or not visible:
        return torch.device("cpu")
    return torch.device(
        accelerator.type, device_index(0 if reading.local_rank is None else reading.local_rank.value, visible)
    )


def choose_device(local_rank: int, requested: str | torch.device | None) -> torch.device:
    """Return the device of a local rank: the requested one, else its accelerator, else the CPU.

    Local. "cuda" without an index means this rank's own one.

    Raises:
        InvalidArgumentError: The requested device is malformed, or not on this host.
        JoinError: There are several devices, but none for this rank.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if requested is None:
        wanted = accelerator or torch.device("cpu")
    elif not isinstance(requested, (str, torch.device)):
        raise InvalidArgumentError(
            f"device={shown(requested)} is no device: pass a name like 'cuda:0', or a torch.device"
        )
    else:
        try:
            wanted = torch.device(requested)
        except (RuntimeError, TypeError) as error:
            raise InvalidArgumentError(f"device={shown(requested)} is no device: {error}") from error
    if wanted.type == "cpu":
        return wanted
    if accelerator is None or accelerator.type != wanted.type:
        here = accelerator.type if accelerator else "no accelerator"
        raise InvalidArgumentError(
            f"device={str(wanted)!r} is not on this host, which has {here}; without device=, init() takes what there is"
        )
    visible = torch.accelerator.device_count()
    if wanted.index is None:
        return torch.device(wanted.type, device_index(local_rank, visible))
    if wanted.index >= visible:
        raise InvalidArgumentError(f"device={str(wanted)!r} is not on this host, where {visible} are visible")
    return wanted


def is_selectable(device: torch.device) -> bool:
    """Return whether a process selects one of several devices of this type: neither the CPU nor MPS, which is one GPU.

    Those two have no communication backend of their own either: gloo carries their tensors through host memory.
    """
    return device.type not in {"cpu", "mps"}


def bind(device: torch.device) -> None:
    """Make a device the current one of its type for this process; does nothing for the CPU and MPS."""
    if is_selectable(device):
        torch.accelerator.set_device_index(device)


def choose_backend(requested: str | None, device: torch.device) -> str:
    """Return the backend configuration for a device: the requested one, else gloo for the CPU and the device's own.

    Local.

    Raises:
        InvalidArgumentError: The requested backend is not in this build of torch, or does not support the device.

    Example:
        >>> choose_backend(None, torch.device("cpu"))
        'gloo'
    """
    if requested is None:
        if not is_selectable(device):
            return "gloo"
        return str(BackendConfig((("cpu", "gloo"), (device.type, dist.get_default_backend_for_device(device)))))
    if not isinstance(requested, str):
        raise InvalidArgumentError(f"backend={shown(requested)} is not a backend's name, as torch writes them: 'gloo'")
    config = BackendConfig.parse(requested)
    for device_type, backend in config.pairs:
        if not _is_available(backend):
            raise InvalidArgumentError(
                f"backend={shown(requested)}: {backend!r} is not in this build of torch, which has "
                f"{', '.join(filter(_is_available, dist.Backend.backend_list))}"
            )
        supported = _device_types_of(backend)
        if not supported & ({device_type} if device_type else {"cpu", device.type}):
            raise InvalidArgumentError(
                f"backend={shown(requested)}: {backend!r} serves {', '.join(sorted(supported))}, "
                f"not {device_type or device.type}"
            )
    if config.backend_for(device.type) is None:
        raise InvalidArgumentError(f"backend={shown(requested)} has none for this rank's device, {device.type}")
    return requested


def serves(backend: str | None, device: torch.device) -> bool:
    """Return whether a device is selected, and has a backend of its own in this configuration, which is not gloo."""
    own = BackendConfig.parse(choose_backend(backend, device)).backend_for(device.type)
    return is_selectable(device) and own not in {None, "gloo"}


def uuid_of_device(device: torch.device, backend: str | None) -> str:
    """Return the unique id of a device, for a backend that takes a device once only; "" for others, or without an id.

    Local.
    """
    if not serves(backend, device):
        return ""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return str(getattr(properties(device), "uuid", "")) if properties is not None else ""


def _is_available(backend: str) -> bool:
    """Return whether torch can open a backend: its own, registered ones, and those that it registers when it is asked.

    Torch 2.14 and newer find those of installed packages by entry points.
    """
    try:
        return backend not in _PLACEHOLDERS and dist.is_backend_available(backend)
    except Exception as error:
        raise InvalidArgumentError(f"the package that has the backend {backend!r} failed: {error}") from error


def _device_types_of(backend: str) -> set[str]:
    """Return the device types that a backend supports."""
    defaults = dist.Backend.default_device_backend_map.items()
    return {*dist.Backend.backend_capability[backend], *(kind for kind, default in defaults if default == backend)}
