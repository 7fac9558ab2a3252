"""A pod of TPUs: one rank on each host, of a program that is started on all hosts."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import (
    Environ,
    Fact,
    LaunchEnvironment,
    read_port,
    read_text,
    require_int,
)
from rankwise.errors import LauncherEnvironmentError


class TpuHosts:
    """One process on each host of one or more slices of TPUs.

    Reads: TPU_WORKER_ID (CLOUD_TPU_TASK_ID), the index of the host in its slice; TPU_WORKER_HOSTNAMES, the hosts of the
    slice, or TPU_PROCESS_ADDRESSES, their addresses with ports; with several slices MEGASCALE_NUM_SLICES,
    MEGASCALE_SLICE_ID and MEGASCALE_COORDINATOR_ADDRESS, which is on the host of rank zero; and MASTER_ADDR,
    MASTER_PORT if the user set them. Cloud TPU and GKE set these variables in every process of a host, also in one that
    runs alone or that starts a rank for each device with torch_xla. So they are never taken for a launcher's, unless
    the program asks for it.
    """

    name: Final = "tpu"
    description: Final = "one process on each host of a TPU pod; only if named"
    variables: Final = (
        *("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"),
        *("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"),
        *("MASTER_ADDR", "MASTER_PORT"),
    )
    verified: Final = False

    def present(self, environ: Environ) -> bool:  # noqa: ARG002 - whatever the variables
        return False

    def read(self, environ: Environ) -> LaunchEnvironment:
        hosts = tpu_hosts(environ)
        if hosts is None:
            raise LauncherEnvironmentError(
                "launcher='tpu' was asked for, but TPU_WORKER_HOSTNAMES is not set: it has the hosts of the pod, "
                "separated by commas, the same on all of them"
            )
        index_of = "TPU_WORKER_ID" if "TPU_WORKER_ID" in environ else "CLOUD_TPU_TASK_ID"
        because = f"{hosts.source} is: set TPU_WORKER_ID on each host to its index in that list"
        rank, num_hosts = require_int(environ, index_of, because=because), _count(hosts)
        if rank.value >= num_hosts.value:
            raise LauncherEnvironmentError(f"{index_of}={rank.value}, but {hosts.source} has {num_hosts.value} hosts")
        coordinator = read_text(environ, "MEGASCALE_COORDINATOR_ADDRESS")
        if coordinator is not None:
            rank, num_hosts = _of_slices(environ, rank, num_hosts)
        return LaunchEnvironment(
            launcher=self.name,
            rank=rank,
            world_size=num_hosts,
            local_rank=Fact(0, "one process on each host"),
            local_world_size=Fact(1, "one process on each host"),
            node_rank=rank,
            num_nodes=num_hosts,
            host=first_host(environ),
            port=read_port(environ, "MASTER_PORT"),
            job=coordinator or hosts,
        )


def tpu_hosts(environ: Environ) -> Fact[str] | None:
    """Return the hosts of this slice, separated by commas; None if no variable has them.

    Raises:
        LauncherEnvironmentError: The list has an empty name.
    """
    hosts = read_text(environ, "TPU_WORKER_HOSTNAMES") or read_text(environ, "TPU_PROCESS_ADDRESSES")
    if hosts is not None and not all(name.strip() for name in hosts.value.split(",")):
        raise LauncherEnvironmentError(f"{hosts.source}={hosts.value[:200]!r} has an empty name of a host")
    return hosts


def first_host(environ: Environ) -> Fact[str] | None:
    """Return the host where the others connect: MASTER_ADDR, or the first one of the first slice; None if unknown.

    Raises:
        LauncherEnvironmentError: The list of hosts has an empty name.
    """
    given = read_text(environ, "MASTER_ADDR")
    listed = read_text(environ, "MEGASCALE_COORDINATOR_ADDRESS") or tpu_hosts(environ)
    if given is not None or listed is None:
        return given
    return Fact(_without_port(listed.value.partition(",")[0]), listed.source)


def _count(hosts: Fact[str]) -> Fact[int]:
    return Fact(hosts.value.count(",") + 1, hosts.source)


def _of_slices(environ: Environ, rank: Fact[int], num_hosts: Fact[int]) -> tuple[Fact[int], Fact[int]]:
    """Return the rank among the hosts of all slices, which are of one size, and the number of these hosts.

    Raises:
        LauncherEnvironmentError: The number of slices or the index of this one is missing or unreadable, or too large.
    """
    because = "MEGASCALE_COORDINATOR_ADDRESS is: there are several slices of TPUs"
    slices = require_int(environ, "MEGASCALE_NUM_SLICES", because=because)
    index = require_int(environ, "MEGASCALE_SLICE_ID", because=because)
    if index.value >= slices.value:
        raise LauncherEnvironmentError(f"{index.source}={index.value} is not below {slices.source}={slices.value}")
    return (
        Fact(index.value * num_hosts.value + rank.value, f"{index.source} and {rank.source}"),
        Fact(slices.value * num_hosts.value, f"{slices.source} and {num_hosts.source}"),
    )


def _without_port(address: str) -> str:
    """Return the host of "host", "host:port" or "[v6]:port"."""
    name = address.strip()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0] if name.count(":") == 1 else name
