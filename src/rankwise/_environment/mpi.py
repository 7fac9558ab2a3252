"""The facts that every MPI launcher sets, under the names of its own variables."""

from __future__ import annotations

from rankwise._environment.facts import (
    Environ,
    LaunchEnvironment,
    check_exported_world_size,
    one_node,
    read_int,
    read_port,
    read_text,
    require_int,
)


def read_mpi(
    environ: Environ,
    *,
    launcher: str,
    rank: str,
    world_size: str,
    local_rank: str,
    local_world_size: str,
    job: str | None,
) -> LaunchEnvironment:
    """Read the variables of these names.

    No MPI launcher sets the index of the node or the number of nodes; both are known where there is only one node.

    Raises:
        LauncherEnvironmentError: A variable is missing or unreadable.
    """
    own = require_int(environ, rank, because=f"launcher={launcher!r} reads it: start with mpirun or mpiexec")
    size = require_int(environ, world_size, because=f"{rank}={own.value} is: mpirun and mpiexec set both")
    check_exported_world_size(environ, size)
    local_size = read_int(environ, local_world_size)
    node_rank, num_nodes = one_node(local_size, size) or (None, None)
    return LaunchEnvironment(
        launcher=launcher,
        rank=own,
        world_size=size,
        local_rank=read_int(environ, local_rank),
        local_world_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        host=read_text(environ, "MASTER_ADDR"),
        port=read_port(environ, "MASTER_PORT"),
        job=None if job is None else read_text(environ, job),
    )
