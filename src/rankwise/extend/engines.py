"""Engines of other packages: what runs the ranks of `rankwise.launch(fn, ..., on=NAME)` on hosts of its own.

An engine is a class with the attribute and the methods of `Engine`, made without arguments. A package registers it as
an entry point of the group "rankwise.engines", under its name:

    [project.entry-points."rankwise.engines"]
    flux = "flux_for_rankwise:Flux"

A `RankJob` can be pickled. In the process that the engine starts for a rank, `RankChild(job, rank, environ).wait()`
runs the rank in a child process, and returns its `RankOutcome`, however it ends: with the return value, the exception
or the signal. `environ` has the variables by which the rank finds its rank, for one of rankwise's launchers or one of
the engine's own (`rankwise.extend.launchers`). For a rank whose process has vanished, `wait` returns
`RankOutcome.lost(...)`.

`rankwise.launch` makes the results, or the `RankFailedError`, of the outcomes, and calls `cancel` after Ctrl-C.

Example, an engine for this host:
    >>> import signal, rankwise
    >>> class ThisHost:
    ...     name = "this-host"
    ...
    ...     def __init__(self):
    ...         self._jobs = {}
    ...
    ...     def submit(self, jobs):
    ...         ids = []
    ...         for job in jobs:
    ...             ids.append(str(len(self._jobs)))
    ...             self._jobs[ids[-1]] = [self._start(job, rank) for rank in range(job.world_size)]
    ...         return ids
    ...
    ...     def _start(self, job, rank):
    ...         numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world_size, "MASTER_PORT": 29511}
    ...         variables = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    ...         return RankChild(job, rank, variables)
    ...
    ...     def wait(self, job_id):
    ...         return [child.wait() for child in self._jobs[job_id]]
    ...
    ...     def cancel(self, job_id):
    ...         for child in self._jobs[job_id]:
    ...             child.send_signal(signal.SIGKILL)
    ...
    ...     def logs(self, job_id):
    ...         return {}
    >>> rankwise.launch(divmod, 7, 2, nproc=2, on=ThisHost())
    [(3, 1), (3, 1)]
"""

from __future__ import annotations

from rankwise._dependencies import has_posix, missing_posix

if not has_posix():
    raise missing_posix("rankwise.extend.engines")

from rankwise._launch.engines.interface import Engine, RankJob, RankOutcome
from rankwise._launch.engines.rank_child import RankChild

__all__ = ["Engine", "RankChild", "RankJob", "RankOutcome"]
