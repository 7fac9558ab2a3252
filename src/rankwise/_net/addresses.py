"""Addresses that only this host can connect to."""

from __future__ import annotations

from typing import Final

LOOPBACK: Final = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether only this host can come to a host of that name."""
    return host in {"localhost", "::1"} or host.startswith("127.")
