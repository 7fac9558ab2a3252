"""The ranks that a launch starts in a debugger, validated."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from rankwise._arguments import as_integer
from rankwise.errors import InvalidArgumentError, MissingDependencyError

if TYPE_CHECKING:
    from rankwise._launch.scripts import ScriptLaunch


def check_debug(launch: ScriptLaunch) -> None:
    """Check `debug` and `debugpy` of a launch.

    Raises:
        InvalidArgumentError: They are no ranks of this launch, or its target is no Python.
        MissingDependencyError: There is no debugpy.
    """
    for name, rank in (("debug", launch.debug), ("debugpy", launch.debugpy)):
        if rank is None:
            continue
        if as_integer(rank, name) < 0 or (launch.nodes is None and rank >= launch.nproc):
            raise InvalidArgumentError(f"{name}={rank} is no rank: of {launch.nproc} ranks the last is {launch.nproc - 1}")
        if launch.kind == "program":
            raise InvalidArgumentError(f"{name}={rank} needs a Python script or module, and the target is a program")
    if launch.debug is not None and launch.debug == launch.debugpy:
        raise InvalidArgumentError(f"debug={launch.debug} and debugpy={launch.debugpy} name the same rank")
    if launch.debugpy is not None and importlib.util.find_spec("debugpy") is None:
        raise MissingDependencyError("debugpy is not installed, which a rank listens with: pip install debugpy")
