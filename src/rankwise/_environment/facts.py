"""A reading: what the variables of one launcher say about this process, each fact with the variable that said it.

Decided here: how a variable becomes a number, which facts there are, and which combinations cannot be. Which launcher
to believe is decided in `detect`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final, Generic, Protocol, TypeVar

from rankwise.errors import LauncherEnvironmentError, TopologyError, shown

T = TypeVar("T", int, str)

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """A value and where it came from: a variable's name, an argument, or what was learned while joining."""

    value: T
    source: str

    def __str__(self) -> str:
        return f"{self.value} (from {self.source})"


MAX_PORT: Final = 65535
# Ten times the ranks of the largest jobs: what is more is a typing error, and not worth a list of all that are missing.
MAX_RANKS: Final = 1 << 20

# What may be given to rankwise alone, as RANKWISE_RANK and so on.
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

# The numbers that place a rank, in the order in which they are shown.
TOPOLOGY_FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """What one launcher's variables say about this process.

    Attributes:
        launcher: The launcher's name, as in `LAUNCHERS`; "none" for a process that nobody launched.
        rank, world_size, local_rank, local_world_size, node_rank, num_nodes: The place of this process. None where
            the launcher does not say; then it is learned while joining, never guessed.
        host: Where rank zero listens, if anybody said.
        port: The port there, if anybody said.
        job: What names this job, and this step of it, to all of its ranks and to no other job's.
        agent_store: The launcher itself hosts the store at host and port, so no rank has to.
        attempt: How often the launcher has restarted this world.
        warnings: What a person should hear about these variables.
    """

    launcher: str
    rank: Fact[int]
    world_size: Fact[int]
    local_rank: Fact[int] | None = None
    local_world_size: Fact[int] | None = None
    node_rank: Fact[int] | None = None
    num_nodes: Fact[int] | None = None
    host: Fact[str] | None = None
    port: Fact[int] | None = None
    job: Fact[str] | None = None
    agent_store: bool = False
    attempt: int = 0
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            check_topology(self.known_topology())
        except TopologyError as error:
            raise LauncherEnvironmentError(f"what launcher {self.launcher!r} says cannot be true: {error}") from None

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are known to be on one host."""
        return self.local_world_size is not None and self.local_world_size.value == self.world_size.value

    def known_topology(self) -> dict[str, Fact[int]]:
        """Return the known numbers that place this rank, by name."""
        known = ((name, getattr(self, name)) for name in TOPOLOGY_FIELDS)
        return {name: fact for name, fact in known if fact is not None}

    def with_topology(self, **topology: Fact[int]) -> LaunchEnvironment:
        """Return the reading with some of the numbers that place this rank replaced."""
        return replace(self, **topology)  # type: ignore[arg-type]  # the names are those of TOPOLOGY_FIELDS

    def facts(self) -> dict[str, Fact[int] | Fact[str] | None]:
        """Return every fact by name, None where nothing says."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in TOPOLOGY_FIELDS or field.name in {"host", "port", "job"}
        }


Reading = LaunchEnvironment  # its other public name, which programs may use


class Launcher(Protocol):
    """One launcher: how to see that it started this process, and what its variables mean."""

    @property
    def name(self) -> str:
        """The name users know it by; what `launcher=` takes."""

    def present(self, environ: Environ) -> bool:
        """Whether these variables are this launcher's, judging by those that mark it alone."""

    def read(self, environ: Environ) -> LaunchEnvironment:
        """Read the facts.

        Raises:
            LauncherEnvironmentError: A variable is missing, unreadable, or contradicts another.
        """


def check_topology(topology: Mapping[str, Fact[int]]) -> None:
    """Check that the numbers that place a rank can all be true at once; unknown ones are left out.

    Raises:
        TopologyError: They cannot; the message names both numbers and their sources.
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
        LauncherEnvironmentError: It is empty, negative or no whole number.
    """
    for name in names:
        if name in environ:
            return Fact(parse_int(environ[name], name), name)
    return None


def require_int(environ: Environ, name: str, *, because: str) -> Fact[int]:
    """Read a variable that must be there.

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
        LauncherEnvironmentError: It is empty, negative or no whole number.
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
        LauncherEnvironmentError: It is no number from 1 to 65535.
    """
    port = read_int(environ, name)
    if port is not None and not 1 <= port.value <= MAX_PORT:
        raise LauncherEnvironmentError(f"{name}={port.value} is not a port; ports are 1 to {MAX_PORT}")
    return port


def one_node(local_world_size: Fact[int] | None, world_size: Fact[int]) -> tuple[Fact[int], Fact[int]] | None:
    """Return node rank 0 of 1 where all ranks are local ones, which implies it; else None."""
    if local_world_size is None or local_world_size.value != world_size.value:
        return None
    source = f"{local_world_size.source} = {world_size.source}"
    return Fact(0, source), Fact(1, source)


def check_hint(environ: Environ, world_size: Fact[int]) -> None:
    """Check a WORLD_SIZE that was exported without RANK, as batch scripts do, against what the launcher says.

    Raises:
        LauncherEnvironmentError: They differ.
    """
    if "RANK" in environ:  # then it is a complete set that somebody made by hand, and not a hint
        return
    hint = read_int(environ, "WORLD_SIZE")
    if hint is not None and hint.value != world_size.value:
        raise LauncherEnvironmentError(
            f"WORLD_SIZE={hint.value} was exported without RANK, but {world_size.source} says {world_size.value}; "
            "unset WORLD_SIZE, or start that many ranks"
        )
