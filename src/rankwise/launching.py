"""Launching ranks from a program: functions, scripts, modules and other programs, on one host or several.

`rankwise.launch(fn, ...)` is the short form for a function. `FunctionLaunch` pickles a function now and runs it later;
`ScriptLaunch` runs a script, a module or a program, as the command `rankwise launch` does. `Nodes` describes the hosts
of a world, and `Output` how the output of ranks is shown.
"""

from __future__ import annotations

from rankwise._launch.functions import FunctionLaunch
from rankwise._launch.output import Output
from rankwise._launch.scripts import ScriptLaunch
from rankwise._launch.spec import check_nproc, parse_nproc
from rankwise._rendezvous.nodes import Nodes

__all__ = ["FunctionLaunch", "Nodes", "Output", "ScriptLaunch", "check_nproc", "parse_nproc"]
