"""The arguments of `init()`: the same checks apply whether it opens a session, adopts a group, or shares a session."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rankwise._arguments import as_integer
from rankwise._backends import BackendConfig
from rankwise._environment.detect import check_environ, launcher_named
from rankwise._environment.facts import Fact, check_topology
from rankwise._rendezvous.endpoint import parse_address
from rankwise._session.device import choose_device, is_xla
from rankwise._session.session import SessionState
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import InvalidArgumentError, TopologyError, shown


def given_topology(explicit: Mapping[str, object]) -> dict[str, Fact[int]]:
    """Return the numbers that the caller passes as facts.

    Raises:
        InvalidArgumentError: One is not an integer, they are inconsistent, or rank or world size is missing.
    """
    given = {
        name: Fact(as_integer(value, name), f"the argument {name}")
        for name, value in explicit.items()
        if value is not None
    }
    if ("rank" in given) != ("world_size" in given):
        missing = "world_size" if "rank" in given else "rank"
        raise InvalidArgumentError(f"{missing} is not given, but {' and '.join(given)} is: pass rank and world_size")
    try:
        check_topology(given)
    except TopologyError as error:
        raise InvalidArgumentError(str(error)) from None
    return given


def check_sources(launcher: str, environ: Mapping[str, str] | None, address: str | None) -> None:
    """Check the sources of the other facts, even if they will not be read.

    Raises:
        InvalidArgumentError: There is no such launcher, a variable is not a string, or the address is malformed.
    """
    launcher_named(launcher)
    if environ is not None:
        check_environ(environ)
    if address is not None:
        parse_address(address)


def share_session(
    opened: SessionState, backend: str | None, device: str | torch.device | None, given: Mapping[str, Fact[int]]
) -> SessionState:
    """Return a session that shares an open one; closing it leaves that open.

    Raises:
        InvalidArgumentError: The caller's arguments contradict the open session.
    """
    check_compatible(opened, backend, device, given)
    return SessionState(
        opened.reading, comm=opened.comm, device=opened.device, group=opened.group, backend=opened.backend
    )


def check_compatible(
    opened: SessionState, backend: str | None, device: str | torch.device | None, given: Mapping[str, Fact[int]]
) -> None:
    """Check that the arguments of `init()` agree with a session, or with a group that other code opened.

    Raises:
        InvalidArgumentError: They do not.
    """
    remedy = "; call rankwise.finalize() first" if opened.settled else ""
    if backend is not None:
        wanted = BackendConfig.parse(backend).backends if isinstance(backend, str) else ("",)
        if not set(wanted) <= set(BackendConfig.parse(opened.backend or "").backends):
            raise InvalidArgumentError(
                f"backend={shown(backend)}, but this process has joined with {opened.backend!r}{remedy}"
            )
    local_rank = opened.reading.local_rank
    if device is not None:
        if opened.device.type == DEVICE_TYPE and is_xla(device):
            asked = opened.device
        else:
            asked = choose_device(0 if local_rank is None else local_rank.value, device)
        if asked.type != opened.device.type:
            raise InvalidArgumentError(f"device={str(asked)!r}, but this process uses {str(opened.device)!r}{remedy}")
    for name, fact in given.items():
        found: Fact[int] | None = getattr(opened.reading, name)
        if found is not None and found.value != fact.value:
            raise InvalidArgumentError(f"{name}={fact.value}, but this process has joined with {name} {found}{remedy}")
