"""Launching ranks from a program: functions, scripts, modules and other programs, on one host, several, or an engine's.

`rankwise.launch(fn, ...)` is the short form for a function. `FunctionLaunch` pickles a function now and runs it later;
`ScriptLaunch` runs a script, a module or a program, as the command `rankwise launch` does. `Nodes` describes the hosts
of a world, and `Output` how the output of ranks is shown. `SlurmEngine` and `RayEngine` are engines, which run the
ranks on hosts that they choose, for `launch(fn, ..., on=SlurmEngine(time="1:00:00"))`; `launch_many` gives them many
launches at once.
"""

from __future__ import annotations

from rankwise._launch.engines.ray_engine import RayEngine
from rankwise._launch.engines.slurm_engine import SlurmEngine
from rankwise._launch.functions import FunctionLaunch, launch_many
from rankwise._launch.output import Output
from rankwise._launch.scripts import ScriptLaunch
from rankwise._launch.spec import check_nproc, parse_nproc
from rankwise._rendezvous.nodes import Nodes

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
