"""Which launcher started this process: the first that matches, in the order below."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from rankwise._environment.clouds import AZURE_ML, KUBERNETES, Kubeflow, SageMaker
from rankwise._environment.facts import OVERRIDE_PREFIX, Environ, LaunchEnvironment
from rankwise._environment.installed import installed_launchers
from rankwise._environment.mpi import INTEL_MPI, MPICH, MPT, MVAPICH2, MVAPICH3, OPEN_MPI, PLATFORM_MPI, PMI
from rankwise._environment.nesting import without_outer_ranks
from rankwise._environment.own_launcher import Launcher, OwnLauncher
from rankwise._environment.schedulers import ALPS, FLUX, JSRUN, PALS, PBSDSH, SUBMITIT, Slurm
from rankwise._environment.single import SingleProcess, refuse_incomplete, refuse_incomplete_override
from rankwise._environment.torch_like import (
    DEEPSPEED,
    RAY_TRAIN,
    AccelerateLaunch,
    Lightning,
    RankwiseLaunch,
    Torchrun,
    TorchVariables,
)
from rankwise._environment.tpu import TpuHosts
from rankwise._environment.unsupported import refuse_task_without_step, refuse_unsupported
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError, shown

_OVERRIDE: Final = TorchVariables(
    name="override", description="variables for rankwise alone, set by hand", prefix=OVERRIDE_PREFIX
)
_PLAIN: Final = TorchVariables(
    name="plain", description="RANK and WORLD_SIZE, set by hand or by a launcher without variables of its own"
)

_SLURM: Final = Slurm()

_BEFORE_INSTALLED: Final[tuple[OwnLauncher, ...]] = (
    _OVERRIDE,  # the user set these variables for rankwise alone
    RankwiseLaunch(),  # before torchrun: it sets the same variables, and one more
    AccelerateLaunch(),  # likewise
    Torchrun(),  # before MPI and Slurm: it is started through them, once for each node, and their ranks are not its own
)
# The launchers of other installed packages stand here. After torchrun, which they too may start once for each node;
# before the others, because they may set RANK, or be started through mpirun or srun, and have a variable of their own.
_AFTER_INSTALLED: Final[tuple[OwnLauncher, ...]] = (
    RAY_TRAIN,  # before plain, as the next: they set RANK too, and more
    DEEPSPEED,
    _PLAIN,  # before MPI and Slurm: a RANK that is set by hand is more specific than the scheduler's
    Lightning(),  # sets no RANK; before Slurm, in a step of one task of which it starts its processes
    SUBMITIT,  # before those of the shell in which its executor was used
    FLUX,  # before jsrun, MPI and Slurm, which may have started Flux itself
    JSRUN,  # before Open MPI, whose variables Spectrum MPI adds to those of jsrun
    AZURE_ML,  # before Open MPI: it sets the same variables, and an address
    OPEN_MPI,  # before Slurm: mpirun starts one daemon a node through srun, and its ranks inherit the daemon's SLURM_*
    INTEL_MPI,  # likewise
    # Likewise, and after Intel MPI, which sets the same variables, and one more.
    MPICH,
    # After Hydra, which is the mpiexec of MVAPICH, and whose variables Platform MPI has in part.
    MVAPICH2,
    MVAPICH3,
    PLATFORM_MPI,
    _SLURM,  # a process of its step is a rank only if no inner launcher started it
    PALS,  # after MPI: PALS may start the daemons of an mpirun
    MPT,
    ALPS,
    PMI,  # after those that set its variables too
    # Schedulers, whose variables single processes have too: last, and recognized only with the number of ranks.
    Kubeflow(),
    PBSDSH,
    SageMaker(),
    KUBERNETES,
    TpuHosts(),  # only if named: its variables are set in all processes of a host
    SingleProcess(),  # no launcher: a world of one
)
LAUNCHERS: Final = (*_BEFORE_INSTALLED, *_AFTER_INSTALLED)
_NAMES: Final = frozenset(launcher.name for launcher in LAUNCHERS)

# Those that start processes on the nodes of a cluster, and may do so inside a script that has exported RANK.
_CLUSTER_LAUNCHERS: Final = (
    *(FLUX, JSRUN, AZURE_ML, OPEN_MPI, INTEL_MPI, MPICH, MVAPICH2, MVAPICH3, PLATFORM_MPI, _SLURM, PALS, PMI),
)


def detect(environ: Environ, launcher: str = "auto") -> LaunchEnvironment:
    """Return the launch environment of this process, from its launcher's variables.

    Local. Pure: reads nothing but `environ`. It also recognizes the launchers of other installed packages: see
    `rankwise.extend.launchers`.

    Args:
        environ: The variables, usually `os.environ`.
        launcher: The name of the launcher whose variables to read, as listed by `init`, or "auto" for the first that
            matches.

    Raises:
        InvalidArgumentError: There is no launcher of that name, or `environ` is not a mapping of strings to strings.
        LauncherEnvironmentError: The variables are incomplete, contradictory or unreadable, or not that launcher's.

    Example:
        >>> reading = detect({"RANK": "3", "WORLD_SIZE": "8"})
        >>> reading.launcher, str(reading.rank)
        ('plain', '3 (from RANK)')
    """
    check_environ(environ)
    environ = without_outer_ranks(environ, LAUNCHERS)
    named = launcher_named(launcher)
    if named is not None:
        return named.read(environ)
    refuse_incomplete_override(environ)
    chosen = _present(environ, _BEFORE_INSTALLED) or _present(environ, installed_launchers(_NAMES))
    if chosen is not None and chosen not in LAUNCHERS:
        return chosen.read(environ)
    chosen = chosen or next(candidate for candidate in _AFTER_INSTALLED if candidate.present(environ))
    if chosen is LAUNCHERS[-1]:
        refuse_incomplete(environ)
        refuse_task_without_step(environ)
    reading = chosen.read(environ)
    if chosen in (OPEN_MPI, AZURE_ML):
        _refuse_another_mpi(reading, environ)
    if isinstance(chosen, TorchVariables):
        if chosen is not _OVERRIDE:
            _refuse_another_world(reading, environ)
        return _completed(reading, environ)
    if reading.world_size.value == 1 and not isinstance(chosen, Torchrun):
        refuse_unsupported(environ, any_value=chosen is LAUNCHERS[-1])
    return reading


def launchers() -> tuple[Launcher, ...]:
    """Return the launchers that rankwise recognizes, in the order in which it looks for their variables.

    Local. Each has a `name`, as `init(launcher=)` takes it, a `description`, and two methods: `present(environ)`
    returns whether it set these variables, and `read(environ)` returns the facts in them, as a `LaunchEnvironment`. The
    last one, "none", is always present. Launchers of other installed packages come after torchrun: see
    `rankwise.extend.launchers`.

    Example:
        >>> [launcher.name for launcher in launchers() if launcher.present({"RANK": "3"})]
        ['plain', 'none']
    """
    return (*_BEFORE_INSTALLED, *installed_launchers(_NAMES), *_AFTER_INSTALLED)


def _present(environ: Environ, candidates: tuple[Launcher, ...]) -> Launcher | None:
    """Return the first of these launchers that is present; None if none is."""
    return next((candidate for candidate in candidates if candidate.present(environ)), None)


def check_environ(environ: Mapping[str, str]) -> None:
    """Check that variables map strings to strings.

    Raises:
        InvalidArgumentError: They do not.
    """
    if type(environ).__module__ == "os":  # the process's own do, and a process alone comes here before every collective
        return
    if not isinstance(environ, Mapping):
        raise InvalidArgumentError(f"environ={shown(environ)} is not a mapping of variables, by name")
    for name, value in environ.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgumentError(f"environ has {shown(name)}: {shown(value)}, but variables are strings")


def launcher_named(name: str) -> Launcher | None:
    """Return the launcher of that name; None for "auto".

    Raises:
        InvalidArgumentError: There is none of that name.
    """
    if isinstance(name, str) and name == "auto":
        return None
    known = LAUNCHERS if isinstance(name, str) and name in _NAMES else launchers()
    names = [launcher.name for launcher in known]
    if isinstance(name, str) and name in names:
        return known[names.index(name)]
    close = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise InvalidArgumentError(f"launcher={shown(name)} is none of 'auto', {', '.join(map(repr, names))}{hint}")


def _refuse_another_world(reading: LaunchEnvironment, environ: Environ) -> None:
    """Refuse RANK and WORLD_SIZE that were exported before mpirun or srun: all ranks would have the same RANK.

    With LOCAL_RANK they are from an inner launcher, which starts several ranks in each rank of the outer one. A world
    of one is valid inside any launcher.

    Raises:
        LauncherEnvironmentError: The world sizes of the two differ.
    """
    if reading.world_size.value == 1 or reading.local_rank is not None:
        return
    for _, outer in _readings(environ, _CLUSTER_LAUNCHERS):
        if outer.world_size.value not in {1, reading.world_size.value}:
            raise LauncherEnvironmentError(
                f"{_place_text(reading)} are set, but {_place_text(outer)}; unset RANK and WORLD_SIZE to use the "
                "launcher's, or set LOCAL_RANK too where each process that it started has started several"
            )
        return


def _refuse_another_mpi(reading: LaunchEnvironment, environ: Environ) -> None:
    """Refuse the variables of two MPIs: one has started the other, and they do not say which of them is the inner one.

    Raises:
        LauncherEnvironmentError: Their ranks or world sizes differ.
    """
    for launcher, other in _readings(environ, (INTEL_MPI, MPICH)):
        if other.world_size.value > 1 and _place(other) != _place(reading):
            raise LauncherEnvironmentError(
                f"{_place_text(reading)} are set, but {_place_text(other)}: one mpirun has started the other; unset "
                f"the variables of the outer one, or pass launcher='openmpi' or {launcher.name!r} to rankwise.init()"
            )
        return


def _readings(environ: Environ, candidates: Iterable[Launcher]) -> Iterator[tuple[Launcher, LaunchEnvironment]]:
    """Yield the launchers that are present, but for those whose variables cannot be read: these contradict nothing."""
    for launcher in candidates:
        if launcher.present(environ):
            with suppress(LauncherEnvironmentError):
                yield launcher, launcher.read(environ)


def _place(reading: LaunchEnvironment) -> tuple[int, int]:
    return reading.rank.value, reading.world_size.value


def _place_text(reading: LaunchEnvironment) -> str:
    rank, size = reading.rank, reading.world_size
    return f"{rank.source}={rank.value} and {size.source}={size.value}"


def _completed(reading: LaunchEnvironment, environ: Environ) -> LaunchEnvironment:
    """Add the facts that variables set by hand leave out, from the launcher around them.

    A job script may set RANK and WORLD_SIZE for each task of srun: then Slurm knows the local rank and the nodes, too.
    But RANK may also number other processes than the outer launcher does. So its facts are used only if both agree on
    rank and world size. If their local ranks differ, they also divide the ranks into nodes differently: then the other
    numbers of nodes and local ranks are not used either.
    """
    others = (each for each in launchers() if not isinstance(each, (TorchVariables, SingleProcess)))
    for _, outer in _readings(environ, others):
        if outer.world_size.value != reading.world_size.value:
            continue
        if outer.rank.value != reading.rank.value:
            warning = f"rank is {reading.rank}, but {outer.rank.source}={outer.rank.value} in a world of the same size"
            return replace(reading, warnings=(*reading.warnings, warning))
        agreed = outer.local_rank is not None and (
            reading.local_rank is None or reading.local_rank.value == outer.local_rank.value
        )
        return replace(
            reading,
            local_rank=reading.local_rank or outer.local_rank,
            local_world_size=reading.local_world_size or (outer.local_world_size if agreed else None),
            node_rank=reading.node_rank or (outer.node_rank if agreed else None),
            num_nodes=reading.num_nodes or (outer.num_nodes if agreed else None),
            host=reading.host or outer.host,
            job=reading.job or outer.job,
        )
    return reading
