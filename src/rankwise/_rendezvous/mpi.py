"""Where ranks of MPI on several hosts meet, if nothing in their environment has the address: rank zero's addresses are
broadcast through mpi4py.

A child process of each rank does so, unless the rank itself has initialised MPI: initialising it starts threads, takes
over signals, and ends the process if the library is not the launcher's; and it waits for all ranks without a limit,
where no signal interrupts it. See docs/decisions/0034-addresses-through-mpi.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any, Final

from rankwise._environment.facts import LaunchEnvironment
from rankwise._net.host import own_addresses
from rankwise._rendezvous.endpoint import Endpoint, derived_ports, missing_address
from rankwise._rendezvous.mpi_child import LONGEST, MARK, library, mismatch
from rankwise.errors import JoinError, JoinTimeoutError, printable, shortened

# The launchers whose ranks can use MPI, and that do not set an address.
_LAUNCHERS: Final = frozenset({
    *("openmpi", "azureml", "intelmpi", "mpich", "mvapich2", "mvapich3", "platformmpi", "pals", "mpt", "lsf", "pmi"),
})  # fmt: skip
# The most addresses of a host that are broadcast.
_MOST_HOSTS: Final = 16
# How much of the child's output a message shows.
_SHOWN: Final = 600
_POLL_SECONDS: Final = 0.005
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rankwise._rendezvous.mpi_child import main; main()"
)


def needs_mpi(reading: LaunchEnvironment) -> bool:
    """Return whether the ranks are MPI's, on several hosts, and the environment does not have where they meet."""
    is_known = reading.host is not None and (reading.port is not None or reading.job is not None)
    return (
        reading.launcher in _LAUNCHERS
        and reading.world_size.value > 1
        and not (is_known or reading.is_one_host or reading.agent_store)
    )


def has_mpi4py() -> bool:
    """Return whether mpi4py is installed. Does not import it."""
    return bool(sys.executable) and importlib.util.find_spec("mpi4py") is not None


def endpoint_over_mpi(reading: LaunchEnvironment, *, timeout: float) -> Endpoint:
    """Return where the ranks meet: at rank zero's addresses, which are broadcast through mpi4py.

    Collective over the world.

    Args:
        reading: The launch environment, of which `needs_mpi` is true.
        timeout: Seconds to wait for the other ranks.

    Raises:
        LauncherEnvironmentError: This rank has no mpi4py; the message has the option of the launcher to add.
        JoinError: mpi4py cannot be used, or is built for another MPI than the launcher's.
        JoinTimeoutError: Not all ranks came in time.
    """
    offer: dict[str, Any] = {}
    if reading.rank.value == 0:
        hosts = [reading.host.value] if reading.host else [*own_addresses(), socket.gethostname()]
        offer = {"hosts": hosts[:_MOST_HOSTS], "job": os.urandom(8).hex()}
    found = _broadcast(reading, offer, timeout=timeout)
    offered, job = found.get("hosts"), found.get("job")
    if not isinstance(offered, list) or not offered or not isinstance(job, str):
        raise JoinError(f"rank zero has broadcast {printable(str(found))!r}, which is no address{_remedy(reading)}")
    key = f"{reading.launcher}/{job}"
    return Endpoint(
        host=str(offered[0]),
        other_hosts=tuple(map(str, offered[1:])),
        ports=derived_ports(key) if reading.port is None else (reading.port.value,),
        source="mpi4py",
        key=key,
        agent_store=False,
        one_host=False,
    )


def _broadcast(reading: LaunchEnvironment, offer: dict[str, Any], *, timeout: float) -> dict[str, Any]:
    """Return what rank zero offers.

    Raises:
        LauncherEnvironmentError, JoinError, JoinTimeoutError: As `endpoint_over_mpi`.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return _broadcast_here(mpi, reading, offer, timeout=timeout)
    if not has_mpi4py():
        raise missing_address(reading)
    request = {"rank": reading.rank.value, "world_size": reading.world_size.value, "offer": offer, "seconds": timeout}
    # Hydra's ranks reach it over a descriptor that they have inherited.
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), json.dumps(request)]
    with subprocess.Popen(  # noqa: S603 - this interpreter
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, close_fds=False
    ) as child:
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise _late(reading, timeout) from error
        finally:
            child.kill()
    lines = out.decode(errors="replace").splitlines()
    answers = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if not answers:
        text = " ".join(printable(err.decode(errors="replace")).split())
        raise JoinError(
            f"mpi4py could not be used to find rank zero: its process ended with {child.returncode}: "
            f"{shortened(text, _SHOWN)}{_remedy(reading)}"
        )
    answer: dict[str, Any] = json.loads(answers[-1])
    if answer.get("error"):
        raise JoinError(f"{answer['error']}{_remedy(reading)}")
    return answer


def _broadcast_here(mpi: Any, reading: LaunchEnvironment, offer: dict[str, Any], *, timeout: float) -> dict[str, Any]:  # noqa: ANN401 - a module
    """As `_broadcast`, in this process, which has initialised MPI: it must not be initialised a second time."""
    world = mpi.COMM_WORLD
    problem = mismatch(world.Get_rank(), world.Get_size(), reading.rank.value, reading.world_size.value, library(mpi))
    if problem:
        raise JoinError(f"{problem}{_remedy(reading)}")
    buffer = bytearray(json.dumps(offer).encode().ljust(LONGEST))
    request = world.Ibcast([buffer, mpi.BYTE], root=0)
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            raise _late(reading, timeout)
        time.sleep(_POLL_SECONDS)
    answer: dict[str, Any] = json.loads(buffer)
    return answer


def _late(reading: LaunchEnvironment, timeout: float) -> JoinTimeoutError:
    return JoinTimeoutError(
        f"rank {reading.rank} of {reading.world_size} waited {timeout:g} s in MPI_Init or MPI_Bcast for rank zero's "
        "address: a rank did not come, or has no mpi4py, or has MASTER_ADDR while this one has not"
        f"{_remedy(reading)}"
    )


def _remedy(reading: LaunchEnvironment) -> str:
    return f". Without mpi4py: {missing_address(reading)}"
