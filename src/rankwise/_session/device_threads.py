"""A function in a thread for each XLA device of this process: how a launched process runs its ranks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rankwise import _torch_xla
from rankwise._launch.forkserver.ipc import WorkerResult
from rankwise._launch.forkserver.worker import failed_result, pickle_error, pickled_result
from rankwise._launch.grace_period import GRACE_SECONDS
from rankwise._launch.rank_traceback import keep_program_frames
from rankwise._launch.xla_devices import DeviceResult, DevicesFailedError
from rankwise._session.current import close_current
from rankwise._session.environ import own_environment
from rankwise._session.session import summary_with_location
from rankwise.errors import InvalidArgumentError


def run(fn: Callable[..., Any], args: Sequence[Any], nproc: int | None) -> list[DeviceResult]:
    """Run a function in a thread for each device of this process, and return the results.

    The sessions of threads end with them. Once one has failed, the others have a grace period: a thread cannot be
    stopped, and this process ends with it.

    Raises:
        InvalidArgumentError: This host has another number of devices than `nproc`.
        DevicesFailedError: The function has raised in a thread.
    """
    launched = own_environment().known_topology()
    process, num_processes = launched["local_rank"].value, launched["local_world_size"].value
    devices = _torch_xla.start_devices(process, num_processes)
    found = len(devices) * num_processes
    if nproc not in {None, found}:
        raise InvalidArgumentError(
            f"nproc={nproc}, but this host has {found} XLA device(s): pass that, or None; CPU_NUM_DEVICES sets the "
            "number of CPU devices, TPU_VISIBLE_CHIPS those of TPUs that are used"
        )
    results: queue.SimpleQueue[tuple[str, DeviceResult]] = queue.SimpleQueue()
    for device in devices:
        threading.Thread(
            target=lambda device: results.put((device, _run_rank(device, fn, args))),
            args=(device,),
            name=f"rank on {device}",
            daemon=True,
        ).start()
    return _collected(results, devices)


def _collected(results: queue.SimpleQueue[tuple[str, DeviceResult]], devices: Sequence[str]) -> list[DeviceResult]:
    """Wait for the results of all devices, after the first failure for a grace period only."""
    found: dict[str, DeviceResult] = {}
    deadline: float | None = None
    while len(found) < len(devices):
        try:
            device, one = results.get(timeout=None if deadline is None else max(0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[device] = one
        if one.result.failure is not None and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    if deadline is not None:
        raise DevicesFailedError(list(found.values()))
    return list(found.values())


def _run_rank(device: str, fn: Callable[..., Any], args: Sequence[Any]) -> DeviceResult:
    """Run the function as the rank of a device, in this thread, and close the session that it leaves open."""
    _torch_xla.enter_device(device)
    position = _torch_xla.position()
    try:
        value = pickled_result(fn(*args))
        close_current()
        result = WorkerResult(value=value, time_ns=time.monotonic_ns())
    except BaseException as error:  # noqa: BLE001 - any of them is the result of the rank
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # the first frame is of this function
        keep_program_frames(error)
        result = failed_result(error, position.rank, pickle_error(error))
        close_current(reason=f"left with {summary_with_location(error)}", failed=True)
    return DeviceResult(rank=position.rank, world_size=position.world_size, result=result)
