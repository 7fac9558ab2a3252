"""The error for a missing torch, instead of the traceback of an import inside rankwise.

Installing rankwise installs torch; but a copied package, or an unintended interpreter, may lack it.
"""

from __future__ import annotations

import importlib.util
import sys

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


def missing_torch(purpose: str) -> MissingDependencyError:
    """Return the error for a process that has no torch."""
    return MissingDependencyError(
        f"{purpose} needs PyTorch, but {sys.executable or 'this interpreter'} has no package 'torch': install it, as "
        f"with '{sys.executable or 'python'} -m pip install torch', or use an interpreter that has it",
        name="torch",
    )


def missing_posix(purpose: str) -> MissingDependencyError:
    """Return the error for a system without the modules of POSIX systems, such as Windows."""
    return MissingDependencyError(
        f"{purpose} needs a POSIX system, such as Linux or macOS; on {sys.platform}, getters such as get_rank() work",
        name="fcntl",
    )


def missing_extra(purpose: str, module: str, extra: str) -> MissingDependencyError:
    """Return the error for a package that an extra of rankwise installs.

    Args:
        purpose: The feature that needs it.
        module: The package.
        extra: The extra.
    """
    return MissingDependencyError(
        f"{purpose} needs the package {module!r}, which {sys.executable or 'this interpreter'} does not have: install "
        f"it with pip install 'rankwise[{extra}]'",
        name=module,
    )
