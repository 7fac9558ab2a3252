"""The endpoint where the ranks of a world meet.

Decided here: host and ports, from the launch environment. The protocol spoken there is in `handshake`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from rankwise._arguments import as_text
from rankwise._environment.facts import MAX_PORT, Fact, LaunchEnvironment, parse_int
from rankwise._net.addresses import LOOPBACK, is_loopback
from rankwise._net.job_secret import JobSecret
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError, shown

# Derived ports lie below Linux's ephemeral range (32768 on), so that no outgoing connection holds one by chance.
_FIRST_PORT: Final = 20000
_PORT_COUNT: Final = 12000
_CANDIDATES: Final = 16
# The option by which a launcher sets a variable in all of its ranks.
_OPTIONS: Final = {
    "openmpi": ("mpirun", "-x {}={}"),
    "azureml": ("mpirun", "-x {}={}"),
    "intelmpi": ("mpiexec", "-genv {} {}"),
    "mpich": ("mpiexec", "-genv {} {}"),
    "pmi": ("mpiexec", "-genv {} {}"),
    "mvapich2": ("mpirun_rsh, before the program", "{}={}"),
    "mvapich3": ("mpirun_rsh, before the program", "{}={}"),
    "platformmpi": ("mpirun", "-e {}={}"),
    "lsf": ("jsrun", "-E {}={}"),
    "pals": ("mpiexec", "--env {}={}"),
    "flux": ("flux run", "--env={}={}"),
    "slurm": ("srun", "--export=ALL,{}={}"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address where the ranks meet.

    Attributes:
        host: The host that rank zero, or the launcher's agent, listens on.
        other_hosts: Other addresses of that host, of which some may be unreachable.
        ports: The ports to try, in an order that is the same on every rank. One, if the launcher or the user chose it.
        source: Where host and port come from, for messages.
        key: A text that the ranks of this world share, and that differs between worlds.
        agent_store: The launcher's agent serves a store there, so no rank has to.
        one_host: All ranks are known to be on one host, so sockets listen on loopback only.
        has_secret: The key is a secret of the job, so that ranks have to prove that they know it.
    """

    host: str
    ports: tuple[int, ...]
    source: str
    key: str
    agent_store: bool
    one_host: bool
    other_hosts: tuple[str, ...] = ()
    has_secret: bool = False

    def __str__(self) -> str:
        ports = str(self.ports[0]) if len(self.ports) == 1 else f"{{{','.join(map(str, self.ports))}}}"
        return f"{self.host}:{ports} (from {self.source})"


def choose(reading: LaunchEnvironment, *, launching_process: Callable[[str], str]) -> Endpoint | None:
    """Return the endpoint of a world; None for a world of one without an address.

    Local.

    Args:
        reading: The launch environment of this process.
        launching_process: Returns a unique id of the process that started the ranks of this host, given the name of a
            variable that only ranks have. Called only for a world on one host whose launcher sets neither a port nor a
            job id.

    Raises:
        LauncherEnvironmentError: The address is not set, and cannot be derived; the message names the variables to set.
    """
    if reading.world_size.value == 1 and (reading.host is None or reading.port is None):
        return None
    one_host = reading.is_one_host
    host, port, job = reading.host, reading.port, reading.job
    if host is not None and is_loopback(host.value):
        one_host = True  # no other host could connect there
    if one_host and not reading.agent_store:
        # Regardless of the address that the host's name resolves to, ranks of one host meet at one loopback address.
        host = Fact(LOOPBACK, "one host")
        if port is None and job is None:
            job = Fact(launching_process(reading.rank.source), "the process that started the ranks")

    ports: tuple[int, ...]
    if host is not None and port is not None:
        ports, source, key = (port.value,), f"{host.source} and {port.source}", str(port.value)
    elif host is not None and job is not None and not reading.agent_store:
        key = f"{reading.launcher}/{job.value}"
        ports, source = derived_ports(key), f"{host.source} and {job.source}"
    else:
        raise missing_address(reading)
    return Endpoint(
        host=host.value,
        ports=ports,
        source=source,
        key=key,
        agent_store=reading.agent_store,
        one_host=one_host,
    )


def authenticated(endpoint: Endpoint, secret: JobSecret | None) -> Endpoint:
    """Return the endpoint with a key that only those can compute who have the secret of the job, if there is one."""
    if secret is None:
        return endpoint
    return replace(endpoint, key=secret.code("endpoint", endpoint.key.encode()).hex(), has_secret=True)


def parse_address(address: str) -> tuple[Fact[str], Fact[int]]:
    """Split "host:port" or "[v6]:port".

    Raises:
        InvalidArgumentError: The address has neither form.
    """
    address = as_text(address, "address")
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        number = parse_int(port, "port")
    except LauncherEnvironmentError:
        number = 0
    if not colon or not host or not 1 <= number <= MAX_PORT:
        raise InvalidArgumentError(f"address={shown(address)} is not host:port with a port from 1 to {MAX_PORT}")
    return Fact(host, "address"), Fact(number, "address")


def missing_address(reading: LaunchEnvironment) -> LauncherEnvironmentError:
    """Return the error that a world has no address; it has the option of its launcher that sets one."""
    prefix = "RANKWISE_" if reading.rank.source.startswith("RANKWISE_") else ""
    missing = [f"{prefix}MASTER_ADDR"] if reading.host is None else []
    if reading.port is None and (reading.job is None or reading.agent_store):
        missing.append(f"{prefix}MASTER_PORT")
    are, them = ("are", "them") if len(missing) > 1 else ("is", "it")
    command, option = _OPTIONS.get(reading.launcher, ("", ""))
    options = " ".join(option.format(name, "PORT" if name.endswith("PORT") else "HOST") for name in missing)
    remedy = (
        f"add `{options}` to {command}, where HOST is the host of rank zero"
        if command
        else f"set {them} to where rank zero shall listen, the same for all ranks"
    )
    return LauncherEnvironmentError(
        f"the world has {reading.world_size} ranks, but {' and '.join(missing)} {are} not set, so they cannot meet; "
        f"{remedy}, or pass address='host:port' to rankwise.init()"
    )


def derived_ports(name: str) -> tuple[int, ...]:
    """Return the ports for a job of that name, in an order that is the same on every rank.

    Several candidates, since other programs may use some of them.
    """
    digest = hashlib.blake2s(name.encode()).digest()
    numbers = (int.from_bytes(digest[2 * i : 2 * i + 2], "big") for i in range(_CANDIDATES))
    return tuple(dict.fromkeys(_FIRST_PORT + number % _PORT_COUNT for number in numbers))
