"""Which hosts of a launch meet next, and where; and the store in which they do. Pure decisions of the terminal."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from rankwise._launch.hosts.connection import HostConnection, HostState
from rankwise._net.addresses import LOOPBACK, is_loopback


class StoreValues:
    """The store in which the launchers of the hosts meet: what launchers use of one, and nothing waits here.

    The terminal has them, and not the first host: hosts need not be able to reach it by TCP, and no loss of a host is
    the loss of the store.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def apply(self, operation: str, *arguments: Any) -> Any:  # noqa: ANN401 - those of the operation
        """Apply an operation, and return its result: that of a get is None for a key that is not set."""
        operations: dict[str, Callable[..., Any]] = {
            "set": self._values.__setitem__,
            "get": self._values.get,
            "check": lambda keys: all(key in self._values for key in keys),
            "add": self._add,
        }
        return operations[operation](*arguments)

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total


def next_round(hosts: Sequence[HostConnection], *, least: int, most: int) -> list[HostConnection]:
    """Return the hosts that meet now, in the order of the user; [] if some are not ready, or too few are left.

    Those beyond `most` stay spares.
    """
    left = [host for host in hosts if not host.is_over]
    if len(left) < least or not all(host.state is HostState.READY for host in left):
        return []
    return left[:most]


def waiting_text(hosts: Sequence[HostConnection]) -> str:
    """Return which hosts are not ready, and which are; "" if all are."""
    doing = {HostState.CONNECTING: "ssh has not connected yet", HostState.STARTING: "it starts"}
    missing = [f"{host.name} ({doing[host.state]})" for host in hosts if host.state in doing]
    ready = [host.name for host in hosts if host.state is HostState.READY]
    return f"waiting for {', '.join(missing)}; ready: {', '.join(ready) or 'none'}" if missing else ""


def can_go_on(hosts: Sequence[HostConnection], *, least: int) -> bool:
    """Return whether enough hosts are left for another round."""
    return sum(not host.is_over for host in hosts) >= least


def meeting_address(chosen: Sequence[HostConnection]) -> str:
    """Return the address of the first host for the others.

    Names that only the configuration of ssh knows mean nothing on other hosts. So it is the address at which the first
    host has accepted the connection of ssh; where the first host is the terminal's own, the one that another host has
    accepted a connection from.
    """
    first, *others = chosen
    if all(host.command.is_local for host in chosen):
        return LOOPBACK
    if not first.command.is_local:
        return _plain(first.hello.server if first.hello is not None else "") or first.name.rpartition("@")[2]
    seen = [_plain(host.hello.client) for host in others if host.hello is not None and not host.command.is_local]
    return next((address for address in seen if address and not is_loopback(address)), socket.gethostname())


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")
