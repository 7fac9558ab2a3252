"""Support for collectives between the devices of XLA on the CPU, which are threads of one process.

With torch_xla 2.9 collectives abort the process after 20 s otherwise, for four reasons:

1. XLA on the CPU pairs the participants of a collective by their executable, so all devices have to run the same one.
   Threads that compile one graph at the same time get different ones, and so does a graph in which anything else
   differs between the ranks. So each collective is a graph of its own here, traced and compiled under a lock.
2. Which inputs an executable may overwrite is a part of it, and differs between ranks: XLA_ENABLE_PARAM_ALIASING=0.
3. A thread that synchronises a device without tensors locks the first device instead. So each thread keeps one tensor.
4. Each device occupies a thread of a pool while it runs, and the pool has as many as there are cores:
   XLA_THREAD_POOL_SIZE.

The 20 s cannot be changed, and a busy machine may need more until the last rank has come. So ranks wait for each other
before they start a collective.

Nearly all the time of a test is that of compilations. Devices that execute one graph at the same time compile it once
each, and one after the other often once for all; so `torch_xla.sync` takes the lock too. It waits for no other rank.

None of this is needed on TPUs, and rankwise itself does none of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

_ARRIVAL_SECONDS: Final = 200.0
_supporting = threading.Lock()
_compiling = threading.RLock()
_of_thread = threading.local()


def variables(devices: int) -> dict[str, str]:
    """Return the variables of a process with this many devices; they are read when torch_xla is imported."""
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        "XLA_ENABLE_PARAM_ALIASING": "0",
        "XLA_THREAD_POOL_SIZE": str(2 * devices + 2),
        # Compiling takes half the time. Graphs that are executed once gain nothing by optimization.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        # torch_xla sets it for a moment, and where several threads do, one of them restores the value of another.
        "SKIP_MEGASCALE_PJRT_CLIENT": "true",
    }


def support_collectives() -> None:
    """Let collectives of torch_xla work between the threads of this process."""
    import torch_xla  # noqa: PLC0415 - with the variables
    import torch_xla.core.xla_model as xm  # noqa: PLC0415

    with _supporting:
        if hasattr(xm.all_reduce, "__wrapped__"):
            return
        torch_xla.sync = _one_at_a_time(torch_xla.sync)
        xm.all_gather = _apart(xm.all_gather, unless=_calls_all_reduce)
        for name in ("all_reduce", "reduce_scatter", "all_to_all", "collective_permute"):
            setattr(xm, name, _apart(getattr(xm, name)))


def run_ranks(fn: Callable[[], Any]) -> list[Any]:
    """Call a function in a thread for each device of this process, and return the results in the order of the ranks."""
    from torch_xla._internal import pjrt  # noqa: PLC0415 - as torch_xla.launch does it in its child

    support_collectives()
    results = pjrt._run_thread_per_device(0, 1, fn, pjrt.initialize_multiprocess)
    return [results[rank] for rank in sorted(results)]


def _calls_all_reduce(
    value: Any,
    dim: int = 0,
    groups: Any = None,
    output: Any = None,
    pin_layout: bool = True,  # noqa: FBT002 - torch_xla's
    **_: Any,
) -> bool:
    """Whether `xm.all_gather` pads its input, differently on each rank, and calls `xm.all_reduce`."""
    return pin_layout and output is None and not isinstance(value, list)


def _one_at_a_time(sync: Callable[..., None]) -> Callable[..., None]:
    import torch  # noqa: PLC0415
    import torch_xla  # noqa: PLC0415

    @functools.wraps(sync)
    def synchronised(*args: Any, **kwargs: Any) -> None:
        if not hasattr(_of_thread, "kept"):
            _of_thread.kept = torch.tensor([0.5], device=torch_xla.device())
        with _compiling:
            sync(*args, **kwargs)

    return synchronised


def _apart(
    collective: Callable[..., Any], *, unless: Callable[..., bool] = lambda *_, **__: False
) -> Callable[..., Any]:
    """Return a collective that is a graph of its own, compiled once for all devices."""
    import torch_xla  # noqa: PLC0415
    import torch_xla.core.xla_model as xm  # noqa: PLC0415
    import torch_xla.runtime as xr  # noqa: PLC0415

    @functools.wraps(collective)
    def apart(*args: Any, **kwargs: Any) -> Any:
        if xr.world_size() == 1 or unless(*args, **kwargs):
            return collective(*args, **kwargs)
        device = xm.xla_real_devices([str(torch_xla.device())])
        torch_xla.sync()
        xm.wait_device_ops(device)
        with _compiling:
            together = _all_ranks(xr.world_size())
        together.wait(_ARRIVAL_SECONDS)
        with _compiling:
            result = collective(*args, **kwargs)
            torch_xla.sync()
        xm.wait_device_ops(device)
        return result

    return apart


@functools.cache
def _all_ranks(size: int) -> threading.Barrier:
    """Return the barrier of this number of ranks."""
    return threading.Barrier(size)
