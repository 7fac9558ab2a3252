"""Replacing `ignite.distributed` for the modules of Ignite that import it."""

from __future__ import annotations

import importlib
import sys
from typing import Final

from rankwise.errors import InvalidArgumentError

_REPLACED_PACKAGE: Final = "ignite.distributed"
# The modules of the original, beside the package itself.
_MODULES: Final = (
    ".auto",
    ".comp_models",
    ".comp_models.base",
    ".comp_models.horovod",
    ".comp_models.native",
    ".comp_models.xla",
    ".launcher",
    ".utils",
)


def install() -> None:
    """Make Ignite itself run on rankwise: its engine, metrics and handlers import this package as `ignite.distributed`.

    Local. Call it once, before Ignite is imported; the ranks that `spawn` starts call it too. Programs that only use
    `ignite.distributed` themselves can import this package instead.

    Raises:
        InvalidArgumentError: Ignite was imported before, and its modules refer to the original.
        ImportError: Ignite is not installed.
    """
    if is_installed():
        return
    if _REPLACED_PACKAGE in sys.modules:
        raise InvalidArgumentError(
            "ignite.distributed is imported already, and Ignite's own modules hold on to it; call "
            "rankwise.compat.ignite.install() before the first import of ignite"
        )
    package = importlib.import_module(__package__)
    modules = {_REPLACED_PACKAGE + name: importlib.import_module(f"{__package__}{name}") for name in ("", *_MODULES)}
    sys.modules.update(modules)
    try:
        ignite = importlib.import_module("ignite")
    except ImportError:
        for name in modules:
            del sys.modules[name]
        raise
    # `import` does not set a module that is in sys.modules already as an attribute of its parent.
    ignite.distributed = package  # type: ignore[attr-defined]


def is_installed() -> bool:
    """Return whether this package replaces `ignite.distributed`.

    Local.

    Example:
        >>> is_installed()
        False
    """
    return sys.modules.get(_REPLACED_PACKAGE) is sys.modules[__package__]
