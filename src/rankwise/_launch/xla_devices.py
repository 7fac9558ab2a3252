"""Ranks on the XLA devices of this host: threads of processes that the launcher starts, one thread for each device."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from rankwise import _torch_xla
from rankwise._arguments import integer
from rankwise._launch.forkserver.ipc import WorkerResult
from rankwise._launch.report import describe_failures
from rankwise._pickling import loads
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import InvalidArgumentError, RankFailedError, shown

# It runs a function in a thread for each device. By name, since that package is above this one.
_RUNNER: Final = "rankwise._session.device_threads:run"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceResult:
    """The result of the function on one device: of rank `rank` among `world_size`."""

    rank: int
    world_size: int
    result: WorkerResult


class DevicesFailedError(Exception):
    """The function has raised on a device of a process. For the launcher, which reports it as that rank's failure.

    Attributes:
        results: The results of the devices of that process.
    """

    def __init__(self, results: Sequence[DeviceResult]) -> None:
        super().__init__(results)
        self.results = results


def check_device_launch(backend: object, nproc: object, nodes: object) -> int | None:
    """Check the arguments of a launch on XLA devices, and return the number of devices; None stands for all.

    Raises:
        InvalidArgumentError: There is no such backend, `nproc` is no number, or hosts are named.
        MissingDependencyError: There is no torch_xla.
    """
    if not isinstance(backend, str) or backend != DEVICE_TYPE:
        raise InvalidArgumentError(
            f"backend={shown(backend)}: launch has only 'xla', which starts a rank on each XLA device; without it, it "
            "starts processes, which pass their backend to rankwise.init()"
        )
    number = integer(nproc)
    if nproc is not None and (number is None or number < 1):
        raise InvalidArgumentError(f"nproc={shown(nproc)} is neither the number of XLA devices of this host nor None")
    if nodes is not None:
        raise InvalidArgumentError(
            "nodes and backend='xla' cannot be combined: torch_xla finds the hosts of a pod; make the call on each"
        )
    _torch_xla.require_torch_xla("launch(backend='xla')")
    return number


def run_on_devices(fn: Callable[..., Any], args: Sequence[Any], nproc: int | None) -> list[DeviceResult]:
    """Run a function on each device of this process, in a process that the launcher has started."""
    results: list[DeviceResult] = pkgutil.resolve_name(_RUNNER)(fn, args, nproc)
    return results


def values_by_rank(results: Sequence[Sequence[DeviceResult]]) -> list[Any]:
    """Return the values of the function by rank, given the results of each process."""
    by_rank = {one.rank: one.result.value for of_process in results for one in of_process}
    return [loads(by_rank[rank]) for rank in sorted(by_rank)]


@contextmanager
def reported_by_rank() -> Iterator[None]:
    """Raise the failure of processes as that of the ranks in them.

    Raises:
        RankFailedError: The function has raised on a device, or a process has ended.
        InvalidArgumentError: This host has another number of devices.
    """
    try:
        yield
    except RankFailedError as error:
        cause = error.__cause__
        if isinstance(cause, InvalidArgumentError):  # the function's own would be in a DevicesFailedError
            raise cause from None
        if not isinstance(cause, DevicesFailedError):
            raise
        failed = [one for one in cause.results if one.result.failure is not None]
        failed.sort(key=lambda one: (one.result.consequence, one.result.time_ns))
        original: BaseException | None = None
        with suppress(Exception):  # only that rank may know its class; its text is in the report
            original = loads(failed[0].result.error)
        failures = [one.result.failure for one in failed if one.result.failure is not None]
        raise RankFailedError(describe_failures(failures, failed[0].world_size), failures=failures) from original
