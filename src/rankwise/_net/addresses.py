"""Addresses that only this host can connect to."""

from __future__ import annotations

from typing import Final

LOOPBACK: Final = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether a host name refers to the loopback interface, which only this host can reach."""
    return host in {"localhost", "::1"} or host.startswith("127.")
