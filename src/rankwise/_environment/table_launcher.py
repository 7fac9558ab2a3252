"""A launcher that sets each fact in one variable: the names of its variables are all that it consists of."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise._environment.facts import (
    Environ,
    Fact,
    HostFile,
    LaunchEnvironment,
    check_exported_world_size,
    one_node,
    read_int,
    read_port,
    read_text,
    require_int,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLauncher:
    """A launcher, given by the names of its variables; it also reads MASTER_ADDR and MASTER_PORT.

    Attributes:
        name, description: As every launcher has.
        verified: Whether the variables were seen on the real launcher.
        start: How to start it, for messages: "start with mpirun".
        rank, world_size: The variables of both.
        local_rank, local_world_size, node_rank, num_nodes: Those of the other numbers; empty where it sets none.
        job: That of an id of the job; empty where there is none.
        also: Other names of some of these numbers, by the first name; read where that is not set.
        host_file, skipped: That of the path of a file whose first host is rank zero's, after so many lines.
        recognized_by: All of these must be set; by default, the rank or the world size. `read` refuses one of the two
            without the other.
        other_variables: Those that a subclass reads besides.
    """

    name: str
    description: str
    verified: bool = False
    start: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    job: str = ""
    also: tuple[tuple[str, str], ...] = ()
    host_file: str = ""
    skipped: int = 0
    recognized_by: tuple[str, ...] = ()
    other_variables: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """Every variable that is read, the one for the rank first."""
        numbers = self.rank, self.world_size, self.local_rank, self.local_world_size, self.node_rank, self.num_nodes
        also = [other for _, other in self.also]
        address = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
        names = (*numbers, self.job, *also, *address, self.host_file, *self.recognized_by, *self.other_variables)
        return tuple(dict.fromkeys(filter(None, names)))

    def present(self, environ: Environ) -> bool:
        if self.recognized_by:
            return all(name in environ for name in self.recognized_by)
        return self.rank in environ or self.world_size in environ

    def read(self, environ: Environ) -> LaunchEnvironment:
        size = self._int(environ, self.world_size)
        found = f"launcher={self.name!r} reads it" if size is None else f"{size.source}={size.value} is"
        rank = require_int(environ, self.rank, because=f"{found}: {self.start}")
        if size is None:
            size = require_int(environ, self.world_size, because=f"{self.rank}={rank.value} is: {self.start}")
        check_exported_world_size(environ, size)
        local_size, num_nodes = self._int(environ, self.local_world_size), self._int(environ, self.num_nodes)
        if local_size is None and num_nodes is not None and num_nodes.value == 1:
            local_size = Fact(size.value, f"{size.source}, on one node by {num_nodes.source}")
        implied = one_node(local_size, size) or (None, None)
        reading = LaunchEnvironment(
            launcher=self.name,
            rank=rank,
            world_size=size,
            local_rank=self._int(environ, self.local_rank),
            local_world_size=local_size,
            node_rank=self._int(environ, self.node_rank) or implied[0],
            num_nodes=num_nodes or implied[1],
            host=read_text(environ, "MASTER_ADDR"),
            port=read_port(environ, "MASTER_PORT"),
            job=read_text(environ, self.job),
        )
        path = environ.get(self.host_file)
        return reading.with_host_file(HostFile(path, self.host_file, skipped=self.skipped) if path else None)

    def _int(self, environ: Environ, name: str) -> Fact[int] | None:
        """Read a number under its name, or under its other one."""
        return read_int(environ, *filter(None, (name, dict(self.also).get(name))))
