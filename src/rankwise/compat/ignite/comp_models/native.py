"""Ignite's native model: a process group of torch. And what it reads of Slurm, by rankwise's readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rankwise.compat.ignite._model_backends import NATIVE, NATIVE_BACKENDS, has_native_dist_support
from rankwise.compat.ignite.comp_models.base import ComputationModel
from rankwise.errors import LauncherEnvironmentError
from rankwise.extend._dropins import read_environment
from rankwise.extend.launchers import expand_hosts

__all__ = ["GLOO", "MPI", "NCCL", "_NativeDistModel", "has_native_dist_support"]

NCCL, GLOO, MPI = NATIVE_BACKENDS
# Where Ignite's variables come from.
_FACTS: Final = {
    "RANK": "rank",
    "LOCAL_RANK": "local_rank",
    "WORLD_SIZE": "world_size",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "port",
}


class _NativeDistModel(ComputationModel):
    """The view of a process group of torch, whoever opened it."""

    name = NATIVE


def _expand_hostlist(nodelist: str) -> list[str]:
    """Return the hosts of a Slurm host list, in Slurm's order. Local.

    Raises:
        LauncherEnvironmentError: It is malformed.

    Example:
        >>> _expand_hostlist("node[08-10]")
        ['node08', 'node09', 'node10']
    """
    try:
        return expand_hosts(nodelist)
    except LauncherEnvironmentError as error:
        raise LauncherEnvironmentError(f"hostlist invalid : {error}") from None


def _setup_ddp_vars_from_slurm_env(environ: Mapping[str, str]) -> dict[str, str | int]:
    """Return the variables of torch that a Slurm step's correspond to, as far as they are known. Local.

    Raises:
        LauncherEnvironmentError: The variables are incomplete, contradictory or unreadable.
    """
    reading = read_environment("auto", environ)
    facts = ((variable, getattr(reading, name)) for variable, name in _FACTS.items())
    return {variable: fact.value for variable, fact in facts if fact is not None}
