"""Which launcher started this process: the first that fits, in the order below."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from rankwise._environment.facts import OVERRIDE_PREFIX, Environ, LaunchEnvironment, Launcher
from rankwise._environment.hydra import Hydra
from rankwise._environment.nesting import own_variables
from rankwise._environment.openmpi import OpenMpi
from rankwise._environment.plain import TorchVariables
from rankwise._environment.single import SingleProcess, refuse_half, refuse_half_an_override
from rankwise._environment.slurm import Slurm
from rankwise._environment.torchrun import RankwiseLaunch, Torchrun
from rankwise._environment.unsupported import refuse_task_of_no_step, refuse_unread
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError, shown

_OVERRIDE: Final = TorchVariables(name="override", prefix=OVERRIDE_PREFIX)
_PLAIN: Final = TorchVariables(name="plain")

LAUNCHERS: Final[tuple[Launcher, ...]] = (
    _OVERRIDE,  # somebody decided, and said so to us alone
    RankwiseLaunch(),  # before torchrun: it sets the same variables, and another
    Torchrun(),  # before MPI and Slurm: it is started through them, once for each node, and their ranks are not its own
    _PLAIN,  # likewise: whoever sets RANK by hand knows more than the scheduler
    OpenMpi(),  # before Slurm: mpirun starts one daemon a node through srun, and its ranks inherit the daemon's SLURM_*
    Hydra(name="intelmpi", marker="I_MPI_HYDRA_UUID"),  # likewise
    Hydra(name="mpich"),  # likewise, and after Intel MPI, which sets the same variables, and another
    Slurm(),  # the outermost: only what no inner launcher has claimed is a rank of its own
    SingleProcess(),  # nobody: a world of one
)


def detect(environ: Environ, launcher: str = "auto") -> LaunchEnvironment:
    """Read who this process is from its launcher's variables.

    Local. Pure: nothing is read but `environ`.

    Args:
        environ: The variables, usually `os.environ`.
        launcher: The launcher to believe, by a name that `init` lists, or "auto" for the first that fits.

    Raises:
        InvalidArgumentError: There is no launcher of that name, or `environ` is no mapping of strings to strings.
        LauncherEnvironmentError: The variables are incomplete, contradictory or unreadable, or not that launcher's.

    Example:
        >>> reading = detect({"RANK": "3", "WORLD_SIZE": "8"})
        >>> reading.launcher, str(reading.rank)
        ('plain', '3 (from RANK)')
    """
    check_environ(environ)
    environ = own_variables(environ, LAUNCHERS)
    named = launcher_named(launcher)
    if named is not None:
        return named.read(environ)
    refuse_half_an_override(environ)
    chosen = next(candidate for candidate in LAUNCHERS if candidate.present(environ))
    if chosen is LAUNCHERS[-1]:
        refuse_half(environ)
        refuse_task_of_no_step(environ)
    reading = chosen.read(environ)
    if chosen is _PLAIN:
        _refuse_another_world(reading, environ)
    elif reading.world_size.value == 1 and chosen is not _OVERRIDE and not isinstance(chosen, Torchrun):
        refuse_unread(environ)
    return _complete(reading, environ) if chosen in {_OVERRIDE, _PLAIN} else reading


def check_environ(environ: Mapping[str, str]) -> None:
    """Check that variables are strings, by name.

    Raises:
        InvalidArgumentError: They are not.
    """
    if type(environ).__module__ == "os":  # there it is so, and asked before every collective of a process alone
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
    names = [launcher.name for launcher in LAUNCHERS]
    if isinstance(name, str) and name in names:
        return LAUNCHERS[names.index(name)]
    close = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise InvalidArgumentError(f"launcher={shown(name)} is none of 'auto', {', '.join(map(repr, names))}{hint}")


def _refuse_another_world(reading: LaunchEnvironment, environ: Environ) -> None:
    """Refuse RANK and WORLD_SIZE that were exported around a launcher of another world: all of its ranks have the same.

    With LOCAL_RANK they are an inner launcher's, which starts several ranks in each of the outer one's; and a world of
    one may be anywhere.

    Raises:
        LauncherEnvironmentError: They were.
    """
    if reading.world_size.value == 1 or reading.local_rank is not None:
        return
    for launcher in (
        candidate for candidate in LAUNCHERS if candidate.name in {"openmpi", "intelmpi", "mpich", "slurm"}
    ):
        if not launcher.present(environ):
            continue
        try:
            around = launcher.read(environ)
        except LauncherEnvironmentError:
            continue  # what cannot be read contradicts nothing
        if around.world_size.value not in {1, reading.world_size.value}:
            raise LauncherEnvironmentError(
                f"RANK={reading.rank.value} and WORLD_SIZE={reading.world_size.value} are set, but "
                f"{around.rank.source}={around.rank.value} and {around.world_size.source}={around.world_size.value}; "
                "unset RANK and WORLD_SIZE to believe the launcher, or set LOCAL_RANK too where each process that it "
                "started has started several"
            )
        return


def _complete(reading: LaunchEnvironment, environ: Environ) -> LaunchEnvironment:
    """Add what hand-set variables leave out from the launcher around them, where the two agree on who this is."""
    for launcher in LAUNCHERS:
        if launcher.name in {"override", "plain", "none"} or not launcher.present(environ):
            continue
        try:
            around = launcher.read(environ)
        except LauncherEnvironmentError:
            continue  # its variables are beside the point: the hand-set ones were believed
        if around.world_size.value != reading.world_size.value:
            continue
        if around.rank.value != reading.rank.value:
            warning = (
                f"rank is {reading.rank}, but {around.rank.source}={around.rank.value} in a world of the same size"
            )
            return replace(reading, warnings=(*reading.warnings, warning))
        agreed = around.local_rank is not None and (
            reading.local_rank is None or reading.local_rank.value == around.local_rank.value
        )
        return replace(
            reading,
            local_rank=reading.local_rank or around.local_rank,
            local_world_size=reading.local_world_size or (around.local_world_size if agreed else None),
            node_rank=reading.node_rank or (around.node_rank if agreed else None),
            num_nodes=reading.num_nodes or (around.num_nodes if agreed else None),
            host=reading.host or around.host,
            job=reading.job or around.job,
        )
    return reading
