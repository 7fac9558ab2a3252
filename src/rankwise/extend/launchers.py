"""Launchers of other packages: which class to write, and how rankwise finds it.

A launcher is a class with the attributes and methods of `Launcher`, made without arguments. A package registers it as
an entry point of the group "rankwise.launchers", under its name:

    [project.entry-points."rankwise.launchers"]
    flux = "flux_for_rankwise:Flux"

Every process that has the package installed then recognizes the launcher. It is looked for after RANKWISE_RANK,
`rankwise launch` and torchrun, and before RANK and WORLD_SIZE, MPI and Slurm; the launchers of several packages in the
order of their names. Ranks of `rankwise launch` that start another launcher pass `rankwise.init(launcher=NAME)`.

A launcher that cannot be loaded, has no valid name, or raises in `present` is logged and ignored; it is an error only
for a program that names it. The module is imported by every process that looks for its rank: it should import little.

Example, for Flux:
    >>> class Flux:
    ...     name = "flux"
    ...     description = "flux run"
    ...
    ...     def present(self, environ):
    ...         return "FLUX_TASK_RANK" in environ
    ...
    ...     def read(self, environ):
    ...         because = "FLUX_TASK_RANK is: flux run sets both"
    ...         return LaunchEnvironment(
    ...             launcher=self.name,
    ...             rank=require_int(environ, "FLUX_TASK_RANK", because=because),
    ...             world_size=require_int(environ, "FLUX_JOB_SIZE", because=because),
    ...             local_rank=read_int(environ, "FLUX_TASK_LOCAL_ID"),
    ...             host=read_text(environ, "MASTER_ADDR"),
    ...             port=read_port(environ, "MASTER_PORT"),
    ...             job=read_text(environ, "FLUX_JOB_ID"),
    ...         )
    >>> reading = Flux().read({"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "8"})
    >>> str(reading.rank), str(reading.world_size)
    ('3 (from FLUX_TASK_RANK)', '8 (from FLUX_JOB_SIZE)')
"""

from __future__ import annotations

from rankwise._environment.facts import (
    Fact,
    LaunchEnvironment,
    Launcher,
    one_node,
    parse_int,
    read_int,
    read_port,
    read_text,
    require_int,
)
from rankwise._environment.hostlist import expand as expand_hosts

__all__ = [
    "Fact",
    "LaunchEnvironment",
    "Launcher",
    "expand_hosts",
    "one_node",
    "parse_int",
    "read_int",
    "read_port",
    "read_text",
    "require_int",
]
