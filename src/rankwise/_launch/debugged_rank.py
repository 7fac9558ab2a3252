"""The ranks that a launch starts in a debugger, validated."""

from __future__ import annotations

import importlib.util

from rankwise._arguments import as_integer
from rankwise.errors import InvalidArgumentError, MissingDependencyError


def check_debug(debug: int | None, debugpy: int | None, *, nproc: int, one_host: bool, is_program: bool) -> None:
    """Check `debug` and `debugpy` of a launch.

    Args:
        debug, debugpy: The ranks; None for none.
        nproc: The number of ranks on this host.
        one_host: They are all ranks.
        is_program: The target is neither a Python script nor a module.

    Raises:
        InvalidArgumentError: They are no ranks of this launch, or its target is no Python.
        MissingDependencyError: There is no debugpy.
    """
    for name, rank in (("debug", debug), ("debugpy", debugpy)):
        if rank is None:
            continue
        if as_integer(rank, name) < 0 or (one_host and rank >= nproc):
            raise InvalidArgumentError(f"{name}={rank} is no rank: of {nproc} ranks the last is {nproc - 1}")
        if is_program:
            raise InvalidArgumentError(f"{name}={rank} needs a Python script or module, and the target is a program")
    if debug is not None and debug == debugpy:
        raise InvalidArgumentError(f"debug={debug} and debugpy={debugpy} name the same rank")
    if debugpy is not None and importlib.util.find_spec("debugpy") is None:
        raise MissingDependencyError("debugpy is not installed, which a rank listens with: pip install debugpy")
