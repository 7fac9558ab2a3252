"""What one rank sees of its host and of its own limits, as one message. It does not import torch.

A call that can wait for another machine, a name server or a file server, is made in a thread, which is abandoned after
`ANSWER_SECONDS`: such calls cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, TypeVar

import psutil

from rankwise._environment.facts import Environ
from rankwise._memory import available_memory
from rankwise._net.host import address_towards, host_id, network_id, own_addresses
from rankwise.errors import shortened

# How long a name server or a file system may take to answer.
ANSWER_SECONDS: Final = 3.0
# What stands for a limit that there is not.
UNLIMITED: Final = 1 << 60
# The variables that are compared with what there is on the host.
_VARIABLES: Final = (
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_IB_HCA"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_LONGEST: Final = 600
_NO_ANSWER: tuple[tuple[str, ...], str] = ((), f"no answer within {ANSWER_SECONDS:g} s")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder that programs write to.

    Attributes:
        role, path: "working directory" or "temporary folder", and its path.
        kind: The type of its file system: "ext4"; "" if unknown.
        free: The bytes that this user may still write.
        problem: Why it cannot be used; "" if it can.
    """

    role: str
    path: str
    kind: str = ""
    free: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one rank sees.

    Attributes:
        rank: Its global rank.
        host, host_id: The name of its host, and a unique id of the host and its network.
        warnings: What is unusual about the variables of its launcher.
        variables: Those that are compared with the host, as "NAME=value".
        versions: The versions of Python and of packages, as "torch=2.9.0".
        names, names_problem: The addresses that the name of the host has, or why it has none.
        forward_seconds, reverse_seconds: How long this took, and the lookup of the name of its address.
        address, interface: What it uses to reach rank zero; "" if it needs none.
        interfaces, gpus, adapters: The network interfaces, the number of NVIDIA GPUs and the InfiniBand adapters.
        device, device_id, device_problem: Its accelerator, the unique id of that, or why it has none; or "".
        files, locked_memory, processes: How many files it may open, bytes it may lock, and processes and threads it may
            start.
        memory, shared_memory: The bytes that are left on the host and in its control group, and in /dev/shm; None if
            unknown.
        cores, host_cores, quota: The CPUs on which it may run, their number on the host, and the CPU time that its
            control group grants, in CPUs; None without a limit.
        folders: The folders that programs write to.
    """

    rank: int
    host: str
    host_id: str
    warnings: tuple[str, ...]
    variables: tuple[str, ...]
    versions: tuple[str, ...]
    names: tuple[str, ...]
    names_problem: str
    forward_seconds: float
    reverse_seconds: float
    address: str
    interface: str
    interfaces: tuple[str, ...]
    gpus: int
    adapters: tuple[str, ...]
    device: str = ""
    device_id: str = ""
    device_problem: str = ""
    files: int
    locked_memory: int
    processes: int
    memory: int | None
    shared_memory: int | None
    cores: tuple[int, ...]
    host_cores: int
    quota: float | None
    folders: tuple[Folder, ...]

    def variable(self, name: str) -> str:
        """Return the value of one of the variables; "" if it is not set."""
        return _value_of(name, self.variables)

    def version(self, name: str) -> str:
        """Return the version of a package; "" if it is not installed."""
        return _value_of(name, self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection from the host of one rank to that of another.

    Attributes:
        source, target: The ranks.
        problem: Why there was none; "" if there was.
        offset: How many seconds the clock of the target is ahead.
        round_trip: How long its answer took, in seconds: the offset is not more exact.
    """

    source: int
    target: int
    problem: str = ""
    offset: float = 0.0
    round_trip: float = 0.0


def collect(*, rank: int, warnings: Sequence[str], rank_zero: str, environ: Environ) -> Facts:
    """Return the facts of this process, within a few times `ANSWER_SECONDS`.

    Args:
        rank: Its rank.
        warnings: What is unusual about the variables of its launcher.
        rank_zero: The host where the ranks meet; "" for a world of one.
        environ: The variables.
    """
    address = _in_time(lambda: address_towards(rank_zero, 1), rank_zero) if rank_zero else ""
    found = psutil.net_if_addrs().items()
    start = time.monotonic()
    names, names_problem = _in_time(_names, _NO_ANSWER)
    middle = time.monotonic()
    _in_time(_look_up_own_address, None)
    return Facts(
        rank=rank,
        host=socket.gethostname(),
        host_id=f"{host_id()}/{network_id()}",
        warnings=tuple(shortened(warning, _LONGEST) for warning in warnings),
        variables=compared(environ),
        versions=tuple(_versions()),
        names=names,
        names_problem=names_problem,
        forward_seconds=middle - start,
        reverse_seconds=time.monotonic() - middle,
        address=address,
        interface=next((name for name, every in found if any(each.address == address for each in every)), ""),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        gpus=sum(re.fullmatch(r"nvidia[0-9]+", path.name) is not None for path in Path("/dev").glob("nvidia*")),
        adapters=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
        files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        processes=_processes(),
        memory=available_memory(),
        shared_memory=_free_of_shared_memory(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        host_cores=os.cpu_count() or 1,
        quota=min((quota for folder in _control_groups("cpu") for quota in _quotas(folder)), default=None),
        folders=(
            _folder("working directory", "."),
            _folder("temporary folder", environ.get("TMPDIR") or "/tmp"),  # noqa: S108 - nothing is written there
        ),
    )


def compared(environ: Environ) -> tuple[str, ...]:
    """Return the variables that are compared with the host."""
    return tuple(f"{name}={shortened(environ[name], _LONGEST)}" for name in _VARIABLES if name in environ)


def _in_time(fn: Callable[[], T], otherwise: T) -> T:
    """Return the result of a function, or another value if it has none after `ANSWER_SECONDS`."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(fn()), daemon=True, name="rankwise-doctor")
    thread.start()
    thread.join(ANSWER_SECONDS)
    return results[0] if results else otherwise


def _value_of(name: str, assignments: Sequence[str]) -> str:
    return next((value for key, _, value in (each.partition("=") for each in assignments) if key == name), "")


def _names() -> tuple[tuple[str, ...], str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), str(error)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found)), ""


def _look_up_own_address() -> None:
    address = next(iter(own_addresses()), "127.0.0.1")
    with contextlib.suppress(OSError, UnicodeError):  # no name is a result, too
        # As torch's stores do: an address of IPv4 in the form of IPv6, for which /etc/hosts has no names.
        socket.getnameinfo((address if ":" in address else f"::ffff:{address}", 0, 0, 0), 0)


def _versions() -> Iterator[str]:
    yield f"Python={platform.python_version()}"
    for package in ("rankwise", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{package}={metadata.version(package)}"
    with contextlib.suppress(OSError):  # no driver
        yield f"NVIDIA driver={Path('/sys/module/nvidia/version').read_text(encoding='ascii').strip()}"


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, UNLIMITED)


def _processes() -> int:
    """Return how many processes and threads may be started at most; the limit of a user does not hold for root."""
    left = [_limit(resource.RLIMIT_NPROC) if os.geteuid() else UNLIMITED]
    for folder in _control_groups("pids"):
        most, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        left += [] if most is None or used is None else [max(0, most - used)]
    return min(left)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process, each before the one above it."""
    for line in _CGROUP.read_text(encoding="utf-8").splitlines() if _CGROUP.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = _CGROUPS / controller if controllers else _CGROUPS
            folder = root / path.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _quotas(folder: Path) -> Iterator[float]:
    """Yield the limit of a control group in CPUs, if it has one: of version 2 and of version 1."""
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        granted, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        yield int(granted) / int(period)
    of_group, whole = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if of_group and whole and of_group > 0:
        yield of_group / whole


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max" if there is no limit
        return None


def _free_of_shared_memory() -> int | None:
    try:
        return psutil.disk_usage("/dev/shm").free  # noqa: S108 - its size is read
    except OSError:
        return None


def _folder(role: str, path: str) -> Folder:
    def look() -> Folder:
        try:
            status, real = os.statvfs(path), Path(path).resolve()
        except OSError as error:
            return Folder(role=role, path=path, problem=error.strerror or str(error))
        mounts = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
        return Folder(
            role=role,
            path=str(real),
            kind=max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else "",
            free=status.f_bavail * status.f_frsize,
            problem="it cannot be written to"
            if not os.access(real, os.W_OK | os.X_OK)
            else "it has no inodes left"
            if status.f_files and not status.f_favail
            else "",
        )

    return _in_time(look, Folder(role=role, path=path, problem=_NO_ANSWER[1]))
