"""Launchers of other packages: which class to write, and how rankwise finds it.

A launcher is a class with the attributes and methods of `Launcher`, made without arguments. A package registers it as
an entry point of the group "rankwise.launchers", under its name:

    [project.entry-points."rankwise.launchers"]
    horovod = "horovod_for_rankwise:Horovod"

Every process that has the package installed then recognizes the launcher. It is looked for after RANKWISE_RANK,
`rankwise launch` and torchrun, and before RANK and WORLD_SIZE, MPI and Slurm; the launchers of several packages in the
order of their names. Ranks of `rankwise launch` that start another launcher pass `rankwise.init(launcher=NAME)`.

A launcher that cannot be loaded, has no valid name, or raises in `present` is logged and ignored; it is an error only
for a program that names it. The module is imported by every process that looks for its rank: it should import little.

Example, for Horovod:
    >>> class Horovod:
    ...     name = "horovod"
    ...     description = "horovodrun"
    ...
    ...     def present(self, environ):
    ...         return "HOROVOD_RANK" in environ
    ...
    ...     def read(self, environ):
    ...         because = "HOROVOD_RANK is: horovodrun sets both"
    ...         return LaunchEnvironment(
    ...             launcher=self.name,
    ...             rank=require_int(environ, "HOROVOD_RANK", because=because),
    ...             world_size=require_int(environ, "HOROVOD_SIZE", because=because),
    ...             local_rank=read_int(environ, "HOROVOD_LOCAL_RANK"),
    ...             host=read_text(environ, "MASTER_ADDR"),
    ...             port=read_port(environ, "MASTER_PORT"),
    ...         )
    >>> reading = Horovod().read({"HOROVOD_RANK": "3", "HOROVOD_SIZE": "8"})
    >>> str(reading.rank), str(reading.world_size)
    ('3 (from HOROVOD_RANK)', '8 (from HOROVOD_SIZE)')
"""

from __future__ import annotations

from rankwise._environment.facts import (
    Fact,
    LaunchEnvironment,
    one_node,
    parse_int,
    read_int,
    read_port,
    read_text,
    require_int,
)
from rankwise._environment.hostlist import expand as expand_hosts
from rankwise._environment.own_launcher import Launcher

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
