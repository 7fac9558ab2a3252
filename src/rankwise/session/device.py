"""The device and the backend of a rank, from the devices that are visible to it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rankwise.errors import InvalidArgumentError, JoinError


def device_index(local_rank: int, visible: int) -> int:
    """Return which of the visible devices belongs to a local rank.

    Local. One visible device means that the launcher has chosen (`--gpus-per-task=1`): it is index 0 for every rank.

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


def choose_device(local_rank: int, requested: str | torch.device | None) -> torch.device:
    """Return the device of a local rank: the one asked for, else its accelerator, else the CPU.

    Local. "cuda" without an index means this rank's own one.

    Raises:
        InvalidArgumentError: The requested device is no device, or not there.
        JoinError: There are several devices, but none for this rank.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if requested is None:
        wanted = accelerator or torch.device("cpu")
    else:
        try:
            wanted = torch.device(requested)
        except (RuntimeError, TypeError) as error:
            raise InvalidArgumentError(f"device={requested!r} is no device: {error}") from error
    if wanted.type == "cpu":
        return wanted
    if accelerator is None or accelerator.type != wanted.type:
        here = accelerator.type if accelerator else "no accelerator"
        raise InvalidArgumentError(f"device={str(wanted)!r} is not on this host, which has {here}")
    visible = torch.accelerator.device_count()
    if wanted.index is None:
        return torch.device(wanted.type, device_index(local_rank, visible))
    if wanted.index >= visible:
        raise InvalidArgumentError(f"device={str(wanted)!r} is not on this host, where {visible} are visible")
    return wanted


def bind(device: torch.device) -> None:
    """Make a device the current one of its kind for this process; nothing to do for the CPU."""
    if device.type not in {"cpu", "mps"}:
        torch.accelerator.set_device_index(device)


def choose_backend(requested: str | None, device: torch.device) -> str:
    """Return the backend configuration for a device: the one asked for, else gloo for the CPU and the device's own.

    Local.

    Raises:
        InvalidArgumentError: The requested backend is not in this build of torch.

    Example:
        >>> choose_backend(None, torch.device("cpu"))
        'gloo'
    """
    if requested is None:
        if device.type in {"cpu", "mps"}:
            return "gloo"
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    parts = [part.rpartition(":") for part in str(requested).split(",")]
    for _, _, name in parts:
        if not name or not dist.is_backend_available(name):
            known = [backend for backend in dist.Backend.backend_list if dist.is_backend_available(backend)]
            raise InvalidArgumentError(
                f"backend={requested!r}: {name!r} is not in this build of torch, which has {', '.join(known)}"
            )
    served = {kind for kind, _, _ in parts}
    if "" not in served and device.type not in served:
        raise InvalidArgumentError(f"backend={requested!r} has none for this rank's device, {device.type}")
    return requested
