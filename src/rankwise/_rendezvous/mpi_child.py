"""The process that a rank of MPI starts to receive the address of rank zero; see `mpi`. It imports mpi4py alone."""

from __future__ import annotations

import json
import math
import signal
import sys
from typing import Any, Final

# Its answer is the line that begins so: an MPI may print lines of its own.
MARK: Final = "rankwise-mpi:"
# The size of the broadcast message.
LONGEST: Final = 8192


def mismatch(rank: int, size: int, expected_rank: int, expected_size: int, library: str) -> str:
    """Return why these ranks of MPI are not those of the launcher; "" if they are."""
    if (rank, size) == (expected_rank, expected_size):
        return ""
    return (
        f"mpi4py has rank {rank} of {size} in MPI.COMM_WORLD, but the launcher started rank {expected_rank} of "
        f"{expected_size}: it uses {library}, which is not the MPI of the launcher"
    )


def library(mpi: Any) -> str:  # noqa: ANN401 - a module
    """Return the name and version of the MPI that mpi4py uses."""
    lines = str(mpi.Get_library_version()).strip("\x00").splitlines()
    return " ".join(lines[0].split())[:80] if lines else "an unknown library"


def main() -> None:
    """Broadcast the offer of rank zero to all ranks, and print it."""
    request = json.loads(sys.argv[2])
    # If the rank is killed, nobody else ends this process while it waits for the others.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(request["seconds"]) + 1)
    try:
        from mpi4py import MPI  # noqa: PLC0415 - it initialises MPI
    except (ImportError, RuntimeError) as error:
        _answer({"error": f"mpi4py is installed, but cannot load an MPI: {error}"})
        return
    world = MPI.COMM_WORLD
    problem = mismatch(world.Get_rank(), world.Get_size(), request["rank"], request["world_size"], library(MPI))
    if problem:
        _answer({"error": problem})
        return
    buffer = bytearray(json.dumps(request["offer"]).encode().ljust(LONGEST))
    world.Bcast([buffer, MPI.BYTE], root=0)
    _answer(json.loads(buffer))


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()
