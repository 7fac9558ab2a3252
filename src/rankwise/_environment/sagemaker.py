"""SageMaker: the hosts of a training job that starts the script once on each."""

from __future__ import annotations

import json
from typing import Final

from rankwise._environment.facts import (
    MAX_RANKS,
    Environ,
    Fact,
    LaunchEnvironment,
    check_exported_world_size,
    read_port,
    read_text,
)
from rankwise.errors import LauncherEnvironmentError

# How many characters of a list an error message shows.
_SHOWN: Final = 200


class SageMaker:
    """A host of a SageMaker job without a distribution, where the script runs once on each host.

    Reads: SM_HOSTS (["algo-1", "algo-2"]) and SM_CURRENT_HOST, set by SageMaker's containers; TRAINING_JOB_NAME; and
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Jobs with a distribution start the script with torchrun or mpirun. Because
    many scripts run on each host for themselves, these variables count only with WORLD_SIZE, or if the program names
    this launcher.
    """

    name: Final = "sagemaker"
    description: Final = "a host of a SageMaker job, with one process on each, if WORLD_SIZE is set"
    variables: Final = (
        *("SM_CURRENT_HOST", "SM_HOSTS", "TRAINING_JOB_NAME"),
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
    )
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        return "SM_CURRENT_HOST" in environ and "SM_HOSTS" in environ and "WORLD_SIZE" in environ

    def read(self, environ: Environ) -> LaunchEnvironment:
        hosts, own = hosts_of(environ), environ.get("SM_CURRENT_HOST")
        if own not in hosts:
            raise LauncherEnvironmentError(
                f"SM_CURRENT_HOST={own!r} is not in SM_HOSTS={environ['SM_HOSTS'][:_SHOWN]}; SageMaker sets both"
            )
        rank = Fact(hosts.index(own), "SM_CURRENT_HOST in SM_HOSTS")
        size = Fact(len(hosts), "SM_HOSTS")
        check_exported_world_size(environ, size)
        each = "one process on each host of SM_HOSTS"
        return LaunchEnvironment(
            launcher=self.name,
            rank=rank,
            world_size=size,
            local_rank=Fact(0, each),
            local_world_size=Fact(1, each),
            node_rank=rank,
            num_nodes=size,
            host=read_text(environ, "MASTER_ADDR") or Fact(hosts[0], "SM_HOSTS"),
            port=read_port(environ, "MASTER_PORT"),
            job=read_text(environ, "TRAINING_JOB_NAME"),
        )


def hosts_of(environ: Environ) -> list[str]:
    """Return the hosts of the job, in their order.

    Raises:
        LauncherEnvironmentError: SM_HOSTS is not set, or is not a list of different names.
    """
    text = environ.get("SM_HOSTS")
    if text is None:
        raise LauncherEnvironmentError("SM_HOSTS is not set, but launcher='sagemaker' reads it: SageMaker sets it")
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    names = isinstance(hosts, list) and all(isinstance(host, str) and host for host in hosts)
    if not names or not 0 < len(hosts) <= MAX_RANKS or len(set(hosts)) < len(hosts):
        raise LauncherEnvironmentError(f'SM_HOSTS={text[:_SHOWN]!r} is not a list like ["algo-1", "algo-2"]')
    return sorted(hosts)
