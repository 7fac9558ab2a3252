"""Standing in for `ignite.distributed` where Ignite itself imports it."""

from __future__ import annotations

import importlib
import sys
from typing import Final

from rankwise.errors import InvalidArgumentError

_REPLACED_PACKAGE: Final = "ignite.distributed"
# Where the original keeps the names; Ignite's metrics import from `utils`.
_MODULES: Final = ("", ".auto", ".comp_models", ".launcher", ".utils")


def install() -> None:
    """Make Ignite itself run on rankwise: its engine, metrics and handlers find this in place of `ignite.distributed`.

    Local. Called once, before Ignite is imported; the ranks that `spawn` starts do it too. Programs that use
    `ignite.distributed` under their own name need only import this module instead.

    Raises:
        InvalidArgumentError: Ignite has been imported, and holds on to the original.
        ImportError: There is no Ignite.
    """
    if is_installed():
        return
    if _REPLACED_PACKAGE in sys.modules:
        raise InvalidArgumentError(
            "ignite.distributed is imported already, and Ignite's own modules hold on to it; call "
            "rankwise.compat.ignite.install() before the first import of ignite"
        )
    package = importlib.import_module(__package__)
    names = [_REPLACED_PACKAGE + module for module in _MODULES]
    sys.modules.update(dict.fromkeys(names, package))
    try:
        ignite = importlib.import_module("ignite")
    except ImportError:
        for name in names:
            del sys.modules[name]
        raise
    # What is found in place is not bound to its parent.
    ignite.distributed = package  # type: ignore[attr-defined]


def is_installed() -> bool:
    """Return whether this stands in for `ignite.distributed`.

    Local.

    Example:
        >>> is_installed()
        False
    """
    return sys.modules.get(_REPLACED_PACKAGE) is sys.modules[__package__]
