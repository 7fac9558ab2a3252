"""The facts that a launcher sets in one variable each, given the names of its variables."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rankwise._environment.facts import (
    Environ,
    Fact,
    LaunchEnvironment,
    check_exported_world_size,
    one_node,
    read_int,
    read_port,
    read_text,
    require_int,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVariables:
    """The names of a launcher's variables, and how it is started.

    Attributes:
        start: How to start it, for messages: "start with mpirun".
        rank, world_size: The variables of both, by which the launcher is recognized.
        local_rank, local_world_size, node_rank, num_nodes: Those of the other numbers; empty where it sets none.
        job: That of an id of the job; empty where there is none.
        also: Other names of some of these numbers, by the first name; read where that is not set.
    """

    start: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    job: str = ""
    also: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every variable that `read` reads, the one for the rank first."""
        own = [getattr(self, field.name) for field in fields(self) if field.name not in {"start", "also"}]
        others = [other for _, other in self.also]
        return tuple(dict.fromkeys((*filter(None, own), *others, "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")))

    def present(self, environ: Environ) -> bool:
        """Return whether the rank or the world size is set; `read` refuses one without the other."""
        return self.rank in environ or self.world_size in environ

    def read(self, environ: Environ, launcher: str, host: Fact[str] | None = None) -> LaunchEnvironment:
        """Read the variables of these names.

        Args:
            environ: The variables.
            launcher: The name of the launcher.
            host: The host that rank zero listens on, if MASTER_ADDR is not set.

        Raises:
            LauncherEnvironmentError: A variable is missing or unreadable.
        """
        size = self._int(environ, self.world_size)
        found = f"launcher={launcher!r} reads it" if size is None else f"{size.source}={size.value} is"
        rank = require_int(environ, self.rank, because=f"{found}: {self.start}")
        if size is None:
            size = require_int(environ, self.world_size, because=f"{self.rank}={rank.value} is: {self.start}")
        check_exported_world_size(environ, size)
        local_size, num_nodes = self._int(environ, self.local_world_size), self._int(environ, self.num_nodes)
        if local_size is None and num_nodes is not None and num_nodes.value == 1:
            local_size = Fact(size.value, f"{size.source}, on one node by {num_nodes.source}")
        implied = one_node(local_size, size) or (None, None)
        return LaunchEnvironment(
            launcher=launcher,
            rank=rank,
            world_size=size,
            local_rank=self._int(environ, self.local_rank),
            local_world_size=local_size,
            node_rank=self._int(environ, self.node_rank) or implied[0],
            num_nodes=num_nodes or implied[1],
            host=read_text(environ, "MASTER_ADDR") or host,
            port=read_port(environ, "MASTER_PORT"),
            job=read_text(environ, self.job),
        )

    def _int(self, environ: Environ, name: str) -> Fact[int] | None:
        """Read a number under its name, or under its other one."""
        return read_int(environ, *filter(None, (name, dict(self.also).get(name))))
