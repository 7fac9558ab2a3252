"""torch_xla: the only module that imports it, when it is used; its private names are here and in `_xla_use` alone.

On some devices each rank of torch_xla is a process, on others the ranks are threads of one process: those that
`torch_xla.launch` starts, with a device each. The position of a rank is known to torch_xla alone, not to variables.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rankwise._xla_use import DEVICE_TYPE, is_used
from rankwise.errors import LauncherEnvironmentError, MissingDependencyError

_of_thread: Final = threading.local()


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePosition:
    """The position of the device of the calling thread among all devices.

    Attributes:
        rank, world_size, local_rank, local_world_size, node_rank: As in `Topology`.
        num_processes: The number of processes on all hosts; the ranks of a process are its threads.
        process_index: The index of this process among them.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_processes: int
    process_index: int


def is_device_thread() -> bool:
    """Return whether the calling thread may be a rank itself: ranks of torch_xla are threads of this process."""
    if threading.current_thread() is threading.main_thread() or not is_used():
        return False
    runtime = _runtime()
    return bool(runtime.addressable_device_count() > 1 and runtime.world_size() > 1)


def launched_position() -> DevicePosition | None:
    """Return the position of the calling thread, if `torch_xla.launch` has started it as one of several ranks."""
    if not is_used():
        return None
    runtime = _runtime()
    if runtime.world_size() == 1 or (runtime.addressable_device_count() > 1 and not is_device_thread()):
        return None
    return position()


def require_alone() -> None:
    """Check that torch_xla, which has started no ranks here, does not connect this process to others.

    Raises:
        LauncherEnvironmentError: It does, so each of them would be rank 0 of 1.
    """
    if not is_used() or _runtime().world_size() > 1:  # ranks are other threads
        return
    if (connected := _runtime().process_count()) > 1:
        raise LauncherEnvironmentError(
            f"torch_xla connects {connected} processes, but has started no ranks in this one: start them with "
            "torch_xla.launch(fn) or rankwise.launch(fn, backend='xla'); where each process is a rank, as in SPMD, "
            "call torch.distributed.init_process_group('gloo', init_method='xla://') before"
        )


def position() -> DevicePosition:
    """Return the position of the device of the calling thread; alone, of the only device that is used."""
    runtime = _runtime()
    world_size = runtime.world_size()
    if world_size == 1:
        return DevicePosition(
            rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_processes=1, process_index=0
        )
    return DevicePosition(
        rank=runtime.global_ordinal(),
        world_size=world_size,
        local_rank=runtime.local_ordinal(),
        local_world_size=runtime.local_device_count(),
        node_rank=runtime.host_index(),
        num_processes=world_size // runtime.addressable_device_count(),
        process_index=runtime.process_index(),
    )


def is_installed() -> bool:
    """Return whether this interpreter has torch_xla. Imports nothing."""
    return sys.modules.get("torch_xla") is not None or (
        "torch_xla" not in sys.modules and importlib.util.find_spec("torch_xla") is not None
    )


def require_torch_xla(purpose: str) -> None:
    """Check that torch_xla can be imported, and import it.

    Raises:
        MissingDependencyError: It is not installed, or was built for another version of torch.
    """
    if not is_installed():
        raise MissingDependencyError(
            f"{purpose} needs torch_xla, which this interpreter does not have: install the torch_xla of this torch's "
            "version (pip install torch_xla)",
            name="torch_xla",
        )
    try:
        importlib.import_module("torch_xla")
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs torch_xla, which cannot be imported: {error}; its version has to be that of torch",
            name="torch_xla",
        ) from error


def device() -> Any:  # noqa: ANN401 - a torch.device, and torch may not be imported
    """Return the XLA device of the calling thread."""
    return sys.modules["torch_xla"].device()


def on_own_device(rebuild: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of torch that rebuilds a pickled tensor on an XLA device, for the device of the thread."""

    def rebuild_here(data: Any, dtype: Any, sent: str, *more: Any) -> Any:  # noqa: ANN401 - torch's arguments
        return rebuild(data, dtype, str(device()) if sent.startswith(DEVICE_TYPE) and is_used() else sent, *more)

    return rebuild_here


def device_kind() -> str:
    """Return the kind of the XLA devices: "CPU", "TPU"."""
    return str(_runtime().device_type())


def execute() -> None:
    """Start to execute the operations that are pending on the device of the calling thread; does not wait for them."""
    sys.modules["torch_xla"].sync()


def all_reduce(reduction: str, tensor: Any) -> None:  # noqa: ANN401 - a tensor
    """Reduce a tensor in place over all devices, by "sum", "mul", "min" or "max", when pending operations execute."""
    # The form of torch_xla that works in place has no effect on a tensor that is a view.
    tensor.copy_(importlib.import_module("torch_xla.core.xla_model").all_reduce(reduction, tensor))


def help_device(name: str) -> None:
    """Let the calling thread help the rank of a device, on which it makes no tensors."""
    _set_device(name)
    _of_thread.is_helper = True


def is_helper_thread() -> bool:
    """Return whether the calling thread helps a rank: torch_xla does not allow that both make tensors at one time."""
    return getattr(_of_thread, "is_helper", False)


def num_local_processes() -> int:
    """Return the number of processes that `torch_xla.launch` would start on this host. Initializes no device."""
    internal = importlib.import_module("torch_xla._internal.tpu")
    return int(internal.num_local_processes()) if device_kind() == "TPU" else 1


def start_devices(process: int, num_processes: int) -> list[str]:
    """Start the devices of this process, as `torch_xla.launch` does in its processes, and return their names.

    Args:
        process: The index of this process among those of this host.
        num_processes: Their number.
    """
    importlib.import_module("torch_xla._internal.pjrt").initialize_multiprocess(process, num_processes)
    names: list[str] = importlib.import_module("torch_xla.core.xla_model").get_xla_supported_devices()
    return names


def enter_device(name: str) -> None:
    """Make the calling thread the rank of a device, as `torch_xla.launch` does in its threads."""
    _set_device(name)
    _runtime()._init_world_size_ordinal()  # noqa: SLF001 - no public name returns results


def _set_device(name: str) -> None:
    sys.modules["torch_xla"]._XLAC._xla_set_default_device(name)  # noqa: SLF001 - no public name


def _runtime() -> Any:  # noqa: ANN401 - a module without types
    return importlib.import_module("torch_xla.runtime")
