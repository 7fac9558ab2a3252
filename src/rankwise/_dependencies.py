"""The import of torch, and the errors for packages that are missing, instead of a traceback inside rankwise.

Installing rankwise installs torch; but a copied package, or an unintended interpreter, may lack it.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from functools import partial
from types import FrameType
from typing import Any

from rankwise.errors import MissingDependencyError


def require_torch(purpose: str) -> None:
    """Check that torch can be found, without importing it.

    Args:
        purpose: The feature that needs it, for the message.

    Raises:
        MissingDependencyError: It cannot.
    """
    if sys.modules.get("torch") is None and importlib.util.find_spec("torch") is None:
        raise missing_torch(purpose)


def import_torch() -> None:
    """Import torch, and raise what the handler of a signal has raised in the meantime.

    torch imports numpy in compiled code, which drops any error, KeyboardInterrupt too: without this, a Ctrl-C in these
    seconds may be lost. Or it becomes an ImportError.
    """
    if "torch" in sys.modules or threading.current_thread() is not threading.main_thread():
        import torch  # noqa: PLC0415

        return
    raised: list[BaseException] = []

    def handle(handler: Any, number: int, frame: FrameType | None) -> None:  # noqa: ANN401 - as in typeshed
        try:
            handler(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: partial(handle, handler) for number, handler in before.items() if callable(handler)}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        import torch  # noqa: F401, PLC0415
    except Exception:
        if not raised:
            raise
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handler:  # a handler may have replaced others
                signal.signal(number, before[number])
    if raised:
        raise raised[0]


def missing_torch(purpose: str) -> MissingDependencyError:
    """Return the error for a process that has no torch."""
    return MissingDependencyError(
        f"{purpose} needs PyTorch, but {sys.executable or 'this interpreter'} has no package 'torch': install it, as "
        f"with '{sys.executable or 'python'} -m pip install torch', or use an interpreter that has it",
        name="torch",
    )


def has_posix() -> bool:
    """Return whether there are the modules of POSIX systems: not on Windows."""
    return importlib.util.find_spec("fcntl") is not None


def missing_posix(purpose: str) -> MissingDependencyError:
    """Return the error for a system without the modules of POSIX systems, such as Windows."""
    return MissingDependencyError(
        f"{purpose} needs a POSIX system, such as Linux or macOS; on {sys.platform}, getters and a world of one work",
        name="fcntl",
    )


def missing_package(purpose: str, module: str) -> MissingDependencyError:
    """Return the error for a package that one feature needs.

    Args:
        purpose: The feature.
        module: The package.
    """
    return MissingDependencyError(
        f"{purpose} needs the package {module!r}, which {sys.executable or 'this interpreter'} does not have: "
        f"pip install {module}",
        name=module,
    )
