"""The launch environment: the facts in a launcher's variables, each with the variable that it comes from.

Decided here: how a variable becomes a number, which facts exist, and which combinations are valid. The choice of the
launcher is made in `detect`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final, Generic, TypeVar

from rankwise.errors import LauncherEnvironmentError, TopologyError, shown

T = TypeVar("T", int, str)

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """A value and its source: the name of a variable, an argument, or the other ranks."""

    value: T
    source: str

    def __str__(self) -> str:
        return f"{self.value} (from {self.source})"


@dataclass(frozen=True, slots=True)
class HostFile:
    """A file whose first host is rank zero's. A reader names it; init() opens it, if it needs the host.

    Attributes:
        path: The file, with one host on each line.
        source: The variable that has the path.
        skipped: How many lines at its beginning are of hosts without ranks.
    """

    path: str
    source: str
    skipped: int = 0


MAX_PORT: Final = 65535
# Set by torchrun and by `rankwise launch`, which start ranks again after a failure; by Slurm, which requeues a job.
RESTART_COUNTS: Final = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
# The ranks, and the sizes, that scripts set for themselves where no launcher has started them.
_ALONE: Final = (frozenset({"", "-1", "0"}), frozenset({"", "-1", "1"}))
# Ten times the ranks of the largest jobs. A larger number is a typing error, and an error message that lists all
# missing ranks would not fit into memory.
MAX_RANKS: Final = 1 << 20

# The variables that only rankwise reads: RANKWISE_RANK and so on.
OVERRIDE_PREFIX: Final = "RANKWISE_"
OVERRIDES: Final = tuple(
    f"{OVERRIDE_PREFIX}{name}"
    for name in (
        *(
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "LOCAL_SIZE",
            "GROUP_RANK",
            "NODE_RANK",
            "CROSS_RANK",
        ),
        *("GROUP_WORLD_SIZE", "NUM_NODES", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    )
)

# The numbers that form a topology, in the order in which they are shown.
TOPOLOGY_FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """The facts about this process in the variables of one launcher.

    Attributes:
        launcher: The launcher's name, as in `LAUNCHERS`; "none" for a process without a launcher.
        rank: The index of this process in the world. As all six numbers None where the launcher does not set it; it is
            then computed from the requests of all ranks while joining, never guessed.
        world_size: The number of ranks.
        local_rank: The index of this process among the ranks of its node.
        local_world_size: The number of ranks of its node.
        node_rank: The index of its node.
        num_nodes: The number of nodes.
        host: The host that rank zero listens on, if it is set.
        host_file: A file that has the host, where no variable does.
        port: The port that rank zero listens on, if it is set.
        job: An id of this job and step, the same on all of its ranks and different from that of every other job.
        agent_store: The launcher itself serves the store at host and port, so no rank has to.
        attempt: How often the launcher has restarted this world.
        warnings: Messages for the user about these variables.
    """

    launcher: str
    rank: Fact[int]
    world_size: Fact[int]
    local_rank: Fact[int] | None = None
    local_world_size: Fact[int] | None = None
    node_rank: Fact[int] | None = None
    num_nodes: Fact[int] | None = None
    host: Fact[str] | None = None
    host_file: HostFile | None = None
    port: Fact[int] | None = None
    job: Fact[str] | None = None
    agent_store: bool = False
    attempt: int = 0
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            check_topology(self.known_topology())
        except TopologyError as error:
            raise LauncherEnvironmentError(
                f"the variables of launcher {self.launcher!r} contradict each other: {error}"
            ) from None

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are known to be on one host."""
        return self.local_world_size is not None and self.local_world_size.value == self.world_size.value

    def known_topology(self) -> dict[str, Fact[int]]:
        """Return the numbers of the topology that are known, by name."""
        known = ((name, getattr(self, name)) for name in TOPOLOGY_FIELDS)
        return {name: fact for name, fact in known if fact is not None}

    def with_topology(self, **topology: Fact[int]) -> LaunchEnvironment:
        """Return the environment with some numbers of the topology replaced."""
        return replace(self, **topology)  # type: ignore[arg-type]  # the names are those of TOPOLOGY_FIELDS

    def with_host_file(self, host_file: HostFile | None) -> LaunchEnvironment:
        """Return the environment with a file that has the host, unless the host is known."""
        return self if self.host is not None else replace(self, host_file=host_file)

    def facts(self) -> dict[str, Fact[int] | Fact[str] | None]:
        """Return every fact by name; None for those that are not set."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in TOPOLOGY_FIELDS or field.name in {"host", "port", "job"}
        }


def check_topology(topology: Mapping[str, Fact[int]]) -> None:
    """Check that the numbers of a topology are consistent; unknown ones are absent.

    Raises:
        TopologyError: They are not; the message names both numbers and their sources.
    """
    for name, fact in topology.items():
        least = 1 if name in {"world_size", "local_world_size", "num_nodes"} else 0
        if fact.value < least:
            raise TopologyError(f"{name} {shown(fact.value)} (from {fact.source}) is below {least}")
        if fact.value > MAX_RANKS:
            raise TopologyError(f"{name} {shown(fact.value)} (from {fact.source}) is above {MAX_RANKS}")
    _below(topology, "rank", "world_size")
    _below(topology, "local_rank", "local_world_size")
    _below(topology, "node_rank", "num_nodes")
    _at_most(topology, "local_world_size", "world_size")
    _at_most(topology, "num_nodes", "world_size")


def _below(topology: Mapping[str, Fact[int]], name: str, limit: str) -> None:
    if name in topology and limit in topology and topology[name].value >= topology[limit].value:
        raise TopologyError(f"{name} {topology[name]} is not below {limit} {topology[limit]}")


def _at_most(topology: Mapping[str, Fact[int]], name: str, limit: str) -> None:
    if name in topology and limit in topology and topology[name].value > topology[limit].value:
        raise TopologyError(f"{name} {topology[name]} is above {limit} {topology[limit]}")


def read_int(environ: Environ, *names: str) -> Fact[int] | None:
    """Read the first of these variables that is set as a whole number; None if none is set.

    Raises:
        LauncherEnvironmentError: It is empty, negative or not a whole number.
    """
    for name in names:
        if name in environ:
            return Fact(parse_int(environ[name], name), name)
    return None


def says_others(environ: Environ, *names: str) -> str:
    """Return the first of some variables whose value says that there are other ranks; "" if none does."""
    return next((name for name in names if environ.get(name, "").strip() not in _ALONE[name.endswith("SIZE")]), "")


def require_int(environ: Environ, name: str, *, because: str) -> Fact[int]:
    """Read a variable that has to be set.

    Raises:
        LauncherEnvironmentError: It is missing (the message ends with `because`) or unreadable.
    """
    fact = read_int(environ, name)
    if fact is None:
        raise LauncherEnvironmentError(f"{name} is not set, but {because}")
    return fact


def parse_int(text: str, name: str) -> int:
    """Return the whole number, zero or more, in the variable called `name`.

    Raises:
        LauncherEnvironmentError: It is empty, negative or not a whole number.
    """
    if not text:
        raise LauncherEnvironmentError(f"{name} is set but empty; set it to a whole number, or unset it")
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise LauncherEnvironmentError(f"{name}={text[:40]!r} is not a whole number")
    if text.startswith("-"):
        raise LauncherEnvironmentError(f"{name}={text} is negative; it must be 0 or more")
    return int(text)


def read_text(environ: Environ, name: str) -> Fact[str] | None:
    """Read a variable as text; None if it is not set or empty."""
    text = environ.get(name)
    return Fact(text, name) if text else None


def read_port(environ: Environ, name: str) -> Fact[int] | None:
    """Read a TCP port; None if the variable is not set.

    Raises:
        LauncherEnvironmentError: It is not a number from 1 to 65535.
    """
    port = read_int(environ, name)
    if port is not None and not 1 <= port.value <= MAX_PORT:
        raise LauncherEnvironmentError(f"{name}={port.value} is not a port; ports are 1 to {MAX_PORT}")
    return port


def one_node(local_world_size: Fact[int] | None, world_size: Fact[int]) -> tuple[Fact[int], Fact[int]] | None:
    """Return node rank 0 and one node if all ranks are on this node; None if that is not known."""
    if local_world_size is None or local_world_size.value != world_size.value:
        return None
    source = f"{local_world_size.source} = {world_size.source}"
    return Fact(0, source), Fact(1, source)


def check_exported_world_size(environ: Environ, world_size: Fact[int]) -> None:
    """Check a WORLD_SIZE that was exported without RANK, as by batch scripts, against the launcher's world size.

    Raises:
        LauncherEnvironmentError: They differ.
    """
    if "RANK" in environ:  # then both were set by hand, and describe ranks of their own
        return
    hint = read_int(environ, "WORLD_SIZE")
    if hint is not None and hint.value != world_size.value:
        raise LauncherEnvironmentError(
            f"WORLD_SIZE={hint.value} was exported without RANK, but {world_size.source} is {world_size.value}; "
            "unset WORLD_SIZE, or start that many ranks"
        )


def count_restarts(environ: Environ) -> int:
    """Return how often the ranks were started again: the sum, since each requeued job counts from 0.

    Raises:
        LauncherEnvironmentError: A variable is not a whole number.
    """
    counts = [read_int(environ, name) for name in RESTART_COUNTS]
    return sum(count.value for count in counts if count is not None)
