"""Launching ranks from a program: functions, scripts, modules and other programs, on one host, several, or an engine's.

`rankwise.launch(fn, ...)` is the short form for a function. `FunctionLaunch` pickles a function now and runs it later;
`ScriptLaunch` runs a script, a module or a program, as the command `rankwise launch` does. `Nodes` describes the hosts
of a world, and `Output` how the output of ranks is shown. `SlurmEngine` and `RayEngine` are engines, which run the
ranks on hosts that they choose, for `launch(fn, ..., on=SlurmEngine(time="1:00:00"))`; `launch_many` gives them many
launches at once.
"""

from __future__ import annotations

from rankwise._dependencies import has_posix, missing_posix

if not has_posix():
    raise missing_posix("rankwise.launching")

from typing import TYPE_CHECKING

from rankwise._launch.functions import FunctionLaunch
from rankwise._launch.many import launch_many
from rankwise._launch.options import check_nproc, parse_nproc
from rankwise._launch.output.settings import Output
from rankwise._launch.scripts import ScriptLaunch
from rankwise._rendezvous.nodes import Nodes

if TYPE_CHECKING:
    from rankwise._launch.engines.ray_engine import RayEngine
    from rankwise._launch.engines.slurm_engine import SlurmEngine

__all__ = [
    "FunctionLaunch",
    "Nodes",
    "Output",
    "RayEngine",
    "ScriptLaunch",
    "SlurmEngine",
    "check_nproc",
    "launch_many",
    "parse_nproc",
]


def __getattr__(name: str) -> object:
    """Return an engine, which is imported when it is used: other launches do not depend on it."""
    if name == "RayEngine":
        from rankwise._launch.engines.ray_engine import RayEngine  # noqa: PLC0415

        return RayEngine
    if name == "SlurmEngine":
        from rankwise._launch.engines.slurm_engine import SlurmEngine  # noqa: PLC0415

        return SlurmEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
