"""Kubernetes: the pods of an indexed Job, or of a JobSet with one replicated Job."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="Kubernetes sets the index in the pods of an indexed Job, and the manifest has to set WORLD_SIZE",
    rank="JOB_COMPLETION_INDEX",
    world_size="WORLD_SIZE",
)


class Kubernetes:
    """A pod of an indexed Job that is a rank itself.

    Reads: JOB_COMPLETION_INDEX, set by Kubernetes; and WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which the manifest has
    to set: the number of completions, and the name of the first pod, <job>-0.<service>. Without WORLD_SIZE each pod
    runs alone, as the pods of most indexed Jobs do.
    """

    name: Final = "kubernetes"
    description: Final = "a pod of an indexed Job or JobSet whose manifest sets WORLD_SIZE"
    variables: Final = _VARIABLES.names
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        return "JOB_COMPLETION_INDEX" in environ and "WORLD_SIZE" in environ

    def read(self, environ: Environ) -> LaunchEnvironment:
        return _VARIABLES.read(environ, self.name)
