"""AzureML: the ranks of Open MPI, with an address."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rankwise._environment.facts import Environ, Fact, LaunchEnvironment
from rankwise._environment.openmpi import OpenMpi

_ADDRESSES: Final = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")


class AzureMl(OpenMpi):
    """A rank of an MPI job of AzureML, which Open MPI starts.

    Reads: the variables of Open MPI; AZ_BATCH_MASTER_NODE ("10.0.0.4:6000", whose port is another service's), or
    AZ_BATCHAI_MPI_MASTER_NODE where that is not set. AzureML's PyTorch jobs set RANK, LOCAL_RANK and so on instead.
    """

    name: str = "azureml"
    description: str = "an MPI job of AzureML"
    variables: tuple[str, ...] = (*OpenMpi.variables, *_ADDRESSES)
    verified: bool = False

    def present(self, environ: Environ) -> bool:
        return super().present(environ) and _address(environ) is not None

    def read(self, environ: Environ) -> LaunchEnvironment:
        reading = super().read(environ)
        return replace(reading, host=reading.host or _address(environ))


def _address(environ: Environ) -> Fact[str] | None:
    for name in _ADDRESSES:
        host, colon, port = environ.get(name, "").rpartition(":")
        host = host if colon and port.isdecimal() else environ.get(name, "")
        if host:
            return Fact(host.removeprefix("[").removesuffix("]"), name)
    return None
