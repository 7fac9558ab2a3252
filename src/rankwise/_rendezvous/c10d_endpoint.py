"""Where the launchers of torch's c10d rendezvous meet: which of them serves the store, and its address for the others.

Torch compares the endpoint with what the name of this host resolves to, which may be loopback, or nothing. Here it is
compared with the addresses of this host, and the others look for the address of the endpoint that answers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rankwise._net.addresses import is_loopback
from rankwise._net.connecting import connect_to_any, resolve, resolved_text
from rankwise._net.host import own_addresses
from rankwise._rendezvous.waiting import WaitingReport
from rankwise.errors import LaunchError

T = TypeVar("T")

_PORT: Final = 29400
# How long torch looks for the store, if its option does not say.
_READ_SECONDS: Final = 60
_CONNECT_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.2


def at_endpoint(
    parameters: RendezvousParameters, make: Callable[[RendezvousParameters], T], waiting: WaitingReport
) -> T:
    """Return what a function makes that serves the store of the rendezvous here, or connects to it.

    Args:
        parameters: Those of the rendezvous; the address of the store, and that of this host, are set in them.
        make: The function.
        waiting: Tells the user that nothing answers yet.

    Raises:
        LaunchError: The store cannot be reached.
    """
    host, port = parse_rendezvous_endpoint(parameters.endpoint, _PORT)
    is_host = parameters.get_as_bool("is_host")
    if is_host or (is_host is None and _is_here(host)):
        if not _has_own_name():
            parameters.local_addr = parameters.local_addr or host
        parameters.config["is_host"] = True
        try:
            return make(parameters)
        except RendezvousConnectionError:
            if is_host:  # the user said so
                raise
        # Another launcher on this host may serve it.
    parameters.config["is_host"] = False
    seconds = float(parameters.get_as_int("read_timeout", _READ_SECONDS) or _READ_SECONDS)
    address, own = _reach(host, port, seconds, waiting)
    parameters.endpoint = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    if own != address and not _has_own_name(own):  # if they are equal, the store is on this host
        parameters.local_addr = parameters.local_addr or own
    return make(parameters)


def _is_here(host: str) -> bool:
    """Return whether the host of an endpoint is this one."""
    own_name = socket.gethostname()
    if host in {"localhost", own_name}:
        return True
    try:
        addresses = [str(target.address[0]) for target in resolve([host], [0])]
    except (OSError, UnicodeError):
        return False
    if host in addresses and is_loopback(host):
        return True
    if all(map(is_loopback, addresses)):  # the complete name of this host, as in Debian's /etc/hosts
        return host.partition(".")[0] == own_name.partition(".")[0]
    return bool(set(addresses) & set(own_addresses()))


def _has_own_name(address: str = "") -> bool:
    """Return whether the name of this host leads to it from others, as far as is known here: torch sorts hosts by name.

    Args:
        address: The address that others reach this host at; "" if it is not known.
    """
    try:
        first = str(resolve([socket.gethostname()], [0])[0].address[0])
    except (OSError, UnicodeError):
        return False
    return first in own_addresses() and address in {"", first}


def _reach(host: str, port: int, seconds: float, waiting: WaitingReport) -> tuple[str, str]:
    """Wait until the store listens; return the address at which it has answered, and that of this host on the way."""
    deadline = time.monotonic() + seconds
    waiting.begin()
    while True:
        try:
            with connect_to_any(host, port, _CONNECT_SECONDS) as connection:
                return str(connection.getpeername()[0]), str(connection.getsockname()[0])
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                why = getattr(error, "strerror", None) or str(error)
                raise LaunchError(
                    f"the launcher of host {socket.gethostname()} did not reach the rendezvous at {host}:{port} within "
                    f"{seconds:g} s: {why}{resolved_text(host)}; is a launcher running on that host, and is the port "
                    "open there?"
                ) from error
        waiting.show_endpoint(f"{host}:{port}")
        time.sleep(_PAUSE_SECONDS)
