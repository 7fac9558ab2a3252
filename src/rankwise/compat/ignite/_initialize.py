"""`initialize` and `finalize`, and the `init_method` that they take. The environment is read, never written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit
from weakref import WeakKeyDictionary

import torch.distributed as dist

import rankwise
from rankwise import Group, LaunchEnvironment, Session
from rankwise.compat.ignite._identity import reset_local_rank, with_local_rank
from rankwise.compat.ignite._model_backends import XLA_TPU, advice, available_backends, is_usable
from rankwise.errors import InvalidArgumentError, JoinError, LauncherEnvironmentError
from rankwise.extend._dropins import close_with_group, current_session, open_session, read_environment, world_group
from rankwise.extend.launchers import Fact, parse_int

_ACCEPTED: Final = ("timeout", "init_method", "rank", "world_size", "device_id")
# The default that Ignite documents; torch's is shorter with nccl.
_TIMEOUT_SECONDS: Final = 30 * 60.0
# Ignite documents the CPU as the device of these backends, on a host with GPUs too.
_CPU_BACKENDS: Final = ("gloo", "mpi")
# Ignite's default for MASTER_PORT, where RANK and WORLD_SIZE were set by hand.
_DEFAULT_PORT: Final = 15000
_LOOPBACK: Final = "127.0.0.1"

_init_methods: WeakKeyDictionary[Group, str] = WeakKeyDictionary()


class UnusableEnvironmentError(LauncherEnvironmentError, RuntimeError):
    """A launcher's variables cannot be used. It is a RuntimeError too, which Ignite raises for missing variables."""


class AlreadyJoinedError(JoinError, ValueError):
    """A process group is open. It is a ValueError too, which torch raises below the original's `initialize`."""


def initialize(backend: str, **kwargs: Any) -> None:  # noqa: ANN401 - Ignite's signature
    """Join the world that this process was launched into, by any launcher that rankwise supports, or a world of one.

    Collective over the world.

    Args:
        backend: "gloo", "nccl", "mpi" or "xla-tpu"; or several in torch's notation, "cpu:gloo,cuda:nccl".
        kwargs: `timeout`, a timedelta or seconds, 30 minutes by default; `init_method`, "env://", "tcp://host:port" or
            "file://path"; `rank` and `world_size`, instead of the launcher's; `device_id`, this rank's device. For
            "xla-tpu" only `timeout`.

    Raises:
        InvalidArgumentError: An argument cannot be used.
        LauncherEnvironmentError: The launcher's variables are incomplete, contradictory or unreadable. Here it is
            also a RuntimeError.
        JoinError: The rendezvous failed, or this process has joined already.

    Example:
        >>> initialize("gloo")
        >>> finalize()
    """
    join(backend, kwargs)


def finalize() -> None:
    """Leave the world: close the session, and destroy the process group, whoever opened it. Alone, do nothing.

    Local, except on rank zero, which waits until the others no longer need the store that it serves.

    Example:
        >>> finalize()
    """
    reset_local_rank()
    session = current_session()
    if session is not None:
        close_with_group(session)


def join(backend: str, kwargs: Mapping[str, Any]) -> Session:
    """Join, and return the session: a context manager that leaves again, and reports its error to the other ranks.

    Collective over the world.

    Raises:
        InvalidArgumentError, LauncherEnvironmentError, JoinError: As in `initialize`.
    """
    unknown = sorted(set(kwargs) - set(_ACCEPTED))
    if unknown:
        raise InvalidArgumentError(f"initialize takes no {', '.join(unknown)}; it takes {', '.join(_ACCEPTED)}")
    check_backend(backend)
    if current_session() is not None:
        raise AlreadyJoinedError(
            "Can not create new distributed process group if default one is already initialized (trying to initialize "
            "the default process group twice!): call finalize() first, or leave initialize() out: a process group that "
            "other code has opened is used without it"
        )
    session = _join_devices(kwargs) if backend == XLA_TPU else _join_processes(backend, kwargs)
    record_init_method(session, kwargs.get("init_method"))
    return session


def _join_devices(kwargs: Mapping[str, Any]) -> Session:
    """Join the ranks that torch_xla has started, or a world of one with this process's XLA device."""
    refused = sorted(name for name, value in kwargs.items() if name != "timeout" and value is not None)
    if refused:
        raise InvalidArgumentError(
            f"initialize takes no {', '.join(refused)} with {XLA_TPU!r}, whose ranks torch_xla knows; it takes timeout"
        )
    return rankwise.init(backend="xla", timeout=timeout_seconds(kwargs.get("timeout")))


def _join_processes(backend: str, kwargs: Mapping[str, Any]) -> Session:
    """Open a process group with a backend of torch."""
    device = kwargs.get("device_id", "cpu" if backend in _CPU_BACKENDS else None)
    timeout = timeout_seconds(kwargs.get("timeout"))
    method = InitMethod.parse(kwargs.get("init_method"))
    rank, world_size = kwargs.get("rank", method.rank), kwargs.get("world_size", method.world_size)
    _check_rank_arguments(rank, world_size, kwargs.get("init_method"))
    try:
        if method.path:
            return _join_through_file(method.path, backend, _explicit_or_launched(rank, world_size), timeout=timeout)
        address = method.address or _default_address(read_environment())
        return rankwise.init(
            backend=backend, device=device, timeout=timeout, rank=rank, world_size=world_size, address=address
        )
    except LauncherEnvironmentError as error:
        raise UnusableEnvironmentError(str(error)) from error.__cause__


def check_backend(backend: str) -> None:
    """Check that a backend can be used on this host.

    Raises:
        InvalidArgumentError: The backend cannot be used here.
    """
    if not is_usable(backend):
        raise InvalidArgumentError(
            f"Backend should be one of '{available_backends()}', which this host can use; got {backend!r}"
            f"{advice(backend)}"
        )


def init_method_in_force() -> str | None:
    """Return the `init_method` by which the session in force was opened; None if other code opened it.

    Local.
    """
    session = current_session()
    return None if session is None else _init_methods.get(world_group(session))


def record_init_method(session: Session, init_method: str | None) -> None:
    """Keep the `init_method` that a user specified for a session.

    Local.
    """
    _init_methods[world_group(session)] = init_method or "env://"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitMethod:
    """The parts of an `init_method`.

    Attributes:
        address: The "host:port" that rank zero listens on; None without one.
        path: The file that serves as the store; "" without one.
        rank, world_size: The values in its query; None without them.
    """

    address: str | None = None
    path: str = ""
    rank: int | None = None
    world_size: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> InitMethod:
        """Parse "env://", "tcp://host:port?rank=0&world_size=2" or "file:///path".

        Raises:
            InvalidArgumentError: The text is none of these.
        """
        parts = urlsplit(text or "env://")
        query = dict(parse_qsl(parts.query))
        rank, world_size = (
            parse_int(query[name], f"{name} in {text}") if name in query else None for name in ("rank", "world_size")
        )
        if parts.scheme == "env" and not parts.netloc:
            return cls(rank=rank, world_size=world_size)
        if parts.scheme == "tcp" and parts.netloc:
            return cls(address=parts.netloc, rank=rank, world_size=world_size)
        if parts.scheme == "file" and parts.path:
            return cls(path=parts.netloc + parts.path, rank=rank, world_size=world_size)
        raise InvalidArgumentError(f"init_method={text!r} is none of env://, tcp://host:port, file:///path")


def timeout_seconds(timeout: object) -> float:
    """Return a timeout in seconds.

    Raises:
        InvalidArgumentError: The timeout is neither a timedelta nor a number.
    """
    if timeout is None:
        return _TIMEOUT_SECONDS
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise InvalidArgumentError(f"timeout={timeout!r} is neither a timedelta nor a number of seconds")
    return float(timeout)


def _default_address(reading: LaunchEnvironment) -> str | None:
    """Return Ignite's default address, for variables that were set by hand; None where the launcher provides one.

    If only RANK, LOCAL_RANK and WORLD_SIZE are set, Ignite assumes that all ranks are on this host.
    """
    by_hand = reading.launcher == "plain" and reading.local_rank is not None and reading.local_world_size is None
    if not by_hand or reading.world_size.value == 1 or (reading.host is not None and reading.port is not None):
        return None
    host = _LOOPBACK if reading.host is None else reading.host.value
    port = _DEFAULT_PORT if reading.port is None else reading.port.value
    return f"{host}:{port}"


def _check_rank_arguments(rank: object, world_size: object, init_method: str | None) -> None:
    if (rank is None) == (world_size is None):
        return
    given = f"rank={rank} and world_size={world_size}"
    if init_method is None:
        raise InvalidArgumentError(
            f"Arguments rank and world_size should be None if no init_method is provided, but given {given}; pass "
            "both, or neither"
        )
    raise InvalidArgumentError(f"Both rank and world_size should be provided, but given {given}; or pass neither")


def _explicit_or_launched(rank: int | None, world_size: int | None) -> LaunchEnvironment:
    """Return the rank and world size that the arguments specify; without them, the launcher's environment."""
    reading = read_environment()
    if rank is None or world_size is None:
        return reading
    return LaunchEnvironment(launcher="arguments", rank=Fact(rank, "rank"), world_size=Fact(world_size, "world_size"))


def _join_through_file(path: str, backend: str, reading: LaunchEnvironment, *, timeout: float) -> Session:
    """Open a process group with torch's file store, and return the session that adopts it."""
    rank, world_size = reading.rank.value, reading.world_size.value

    def open_group() -> None:
        limit = timedelta(seconds=timeout)
        try:
            dist.init_process_group(
                backend, init_method=f"file://{path}", rank=rank, world_size=world_size, timeout=limit
            )
        except (RuntimeError, ValueError) as error:
            raise JoinError(
                f"rank {rank} of {world_size} did not meet the others in {path} within {timeout:g} s: {error}"
            ) from error

    return open_session(open_group, with_local_rank(reading))
