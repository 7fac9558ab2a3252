"""`init()` and `finalize()`: a process joins its world, or adopts a process group that is open already."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Final

import torch

from rankwise._arguments import as_bool, as_seconds
from rankwise._comm.comm import Comm
from rankwise._environment.facts import Fact, LaunchEnvironment
from rankwise._rendezvous.endpoint import parse_address
from rankwise._session import current
from rankwise._session.adoption import adopt, environment_in_group
from rankwise._session.call_trace import CallTrace
from rankwise._session.device import wants_xla
from rankwise._session.environ import read_check, read_environment, read_shared_memory
from rankwise._session.hang_watch import HangWatch
from rankwise._session.init_arguments import check_compatible, check_sources, given_topology, share_session
from rankwise._session.lifecycle import open_session
from rankwise._session.session import JOIN_SECONDS, Session
from rankwise._torch import flight_recorder
from rankwise._user_frames import ends_at_caller

log = logging.getLogger(__name__)

# Ten years. A much longer timeout overflows in torch's C++.
_LONGEST_SECONDS: Final = 10 * 365 * 24 * 3600


@ends_at_caller
def init(
    backend: str | None = None,
    *,
    device: str | torch.device | None = None,
    timeout: float | None = None,
    launcher: str = "auto",
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    address: str | None = None,
    check: bool | None = None,
    hang_report: float | None = None,
    trace: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Session:
    """Join the world that this process was launched into, and return the session: a context manager.

    Collective over the world. Works under every launcher that `rankwise env` knows, and alone, where it opens a process
    group of one, so that DDP and FSDP work there too. A process group that is open already is adopted, without
    waiting for the others; a session that is open already is shared, and closing the inner one leaves it open. The
    session ends with the `with` block, with `finalize()`, or with the process.

    Args:
        backend: As torch writes it ("gloo", "cpu:gloo,cuda:nccl"); by default gloo for the CPU, and the accelerator's
            own beside it. "xla" is for the XLA device of torch_xla, without a process group of torch: the default where
            torch_xla has started this rank, which may be a thread, or has opened a process group, and in a process
            alone that has used XLA devices.
        device: This rank's device; by default its accelerator if it has one. "cpu" leaves accelerators alone, "xla" is
            the same as backend="xla".
        timeout: Seconds that joining may take, and every collective after it. By default 300 for joining, and torch's
            default for collectives: 30 minutes, or 10 with backend="nccl". A rank that dies is noticed at once.
        launcher: The launcher whose variables are read. "auto", by default, takes the first that matches of:
            "override", the variables RANKWISE_RANK and so on; "rankwise", which is `rankwise launch`; "accelerate";
            "torchrun"; "ray"; "deepspeed"; "plain", RANK and WORLD_SIZE set by hand; "lightning";
            "submitit"; "flux"; "lsf"; "azureml"; "openmpi"; "intelmpi"; "mpich"; "mvapich2"; "mvapich3";
            "platformmpi"; "slurm"; "pals"; "mpt"; "alps"; "pmi"; "kubeflow"; "pbs"; "sagemaker"; "kubernetes"; "none",
            a world of one.
            "tpu", one process on each host of a TPU pod, is only taken if named.
        rank: This process's rank, instead of the launcher's. Needs world_size.
        world_size: The number of processes.
        local_rank: This process's rank on its node.
        local_world_size: The number of processes on its node.
        address: "host:port" that rank zero listens on, instead of the launcher's.
        check: False lets the reduction of a single tensor on an accelerator begin before this rank knows that all
            ranks make it. This saves the host the wait for the other hosts and ranks, not the device: then a
            difference between the ranks is found by the next call that is checked, after wrong results or a hang.
            The same on all ranks. By default as RANKWISE_CHECK is set, 1 or 0, else True.
        hang_report: After a collective, of rankwise or of torch, has waited for so many seconds, a report on the
            standard error of rank zero names the rank that the others wait for, and where all ranks are; 0 for no
            reports. By default as RANKWISE_HANG_SECONDS is set, else 0. Over a process group that is open already, and
            may span several hosts, ranks then connect now, not in their first collective. See docs/diagnosis.md.
        trace: A folder, in which each rank records when it comes to collectives, for `rankwise trace`. By default as
            RANKWISE_TRACE is set, else there is none. The same on all ranks. See docs/diagnosis.md.
        environ: The variables to read, instead of `os.environ`.

    Raises:
        LauncherEnvironmentError: The variables are incomplete, contradictory or unreadable.
        InvalidArgumentError: An argument cannot be used: no such backend, no such device; or the session or process
            group that is open already has another.
        MissingDependencyError: The backend is "xla", and this interpreter has no torch_xla.
        JoinError: The ranks could not meet, or do not form one world.
        JoinTimeoutError: Not all ranks arrived in time; the message names those that are missing.

    Example:
        >>> import rankwise
        >>> with rankwise.init() as session:
        ...     print(session.rank, session.world_size)
        0 1
    """
    given_timeout = None if timeout is None else as_seconds(timeout, "timeout", most=_LONGEST_SECONDS)
    joining = JOIN_SECONDS if given_timeout is None else given_timeout
    explicit = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "local_world_size": local_world_size}
    given = given_topology(explicit)
    check_sources(launcher, environ, address)
    checks = None if check is None else as_bool(check, "check")
    watch = HangWatch(hang_report, environ)
    traced = CallTrace(trace, environ)
    opened = current.opened_session()
    if opened is not None and current.has_destroyed_group(opened):
        opened.close(failed=True)
        opened = None
    if opened is not None:
        return Session(share_session(opened, backend, device, given))
    group = current.default_group()
    with contextlib.ExitStack() as undo:
        undo.callback(watch.stop)
        if group is not None:
            reading = environment_in_group(group, given, launcher, environ)
            session = adopt(
                group,
                reading,
                check=checks,
                pid=current.opening_pid(group),
                close=lambda reason, _failed: _leave_adopted(comm, reason, watch, traced),
                on_hosts=watch.on_hosts,
            )
            comm = session.comm
            check_compatible(session, backend, device, given)
            session.publish_host()
        else:
            reading = _launch_environment(launcher, environ, given, address)
            checked = read_check(environ) if checks is None else checks

            def reset() -> None:
                watch.stop()
                traced.stop()
                current.reset_current()

            if wants_xla(reading, backend, device):
                from rankwise._session.xla_session import open_xla_session  # noqa: PLC0415 - not needed without such devices

                session = open_xla_session(reading, timeout=joining, check=checked, reset=reset)
            else:
                with flight_recorder(watch.recorded):
                    session = open_session(
                        reading,
                        backend=backend,
                        device=device,
                        joining=joining,
                        timeout=given_timeout or _default_timeout(backend),
                        check=checked,
                        shares_tensors=read_shared_memory(environ),
                        reset=reset,
                        on_hosts=watch.on_hosts,
                    )
        undo.pop_all()
    current.set_current(session)
    traced.start(session)
    watch.start(session.reading, backend=session.backend, adopted=group is not None)
    log.debug("joined as %d of %d via %s", session.rank, session.world_size, session.reading.launcher)
    return Session(session)


def finalize() -> None:
    """Close the session that `init()` opened, if there is one, so that variables are read again afterwards.

    Local, except on rank zero, which waits until the others no longer need the store that it serves.

    Example:
        >>> finalize()
    """
    current.close_current()


def _default_timeout(backend: str | None) -> float:
    """Return torch's default for collectives of a process group, in seconds."""
    from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout  # noqa: PLC0415 - as init()

    is_nccl = isinstance(backend, str) and backend.startswith("nccl")  # also nccl2, nccl-lazy and nccl-legacy
    found: timedelta | None = default_pg_nccl_timeout if is_nccl else default_pg_timeout
    return (found or timedelta(minutes=10)).total_seconds()  # a build without NCCL has none for it


def _leave_adopted(comm: Comm, reason: str, watch: HangWatch, traced: CallTrace) -> None:
    """Close the connections of a session over a process group that other code opened; the group stays open."""
    watch.stop()
    traced.stop()
    current.reset_current()
    comm.close_children(reason)
    comm.shutdown(reason)


def _launch_environment(
    launcher: str, environ: Mapping[str, str] | None, given: Mapping[str, Fact[int]], address: str | None
) -> LaunchEnvironment:
    """Read the environment, and replace its facts by the caller's arguments."""
    if "rank" in given:
        reading = LaunchEnvironment(launcher="arguments", rank=given["rank"], world_size=given["world_size"])
        if reading.world_size.value == 1:
            reading = replace(read_environment("none"), launcher="arguments")
        elif address is None:
            outer = read_environment(launcher, environ)
            reading = replace(
                reading,
                host=outer.host,
                host_file=outer.host_file,
                port=outer.port,
                job=outer.job,
                agent_store=outer.agent_store,
                attempt=outer.attempt,
            )
    else:
        reading = read_environment(launcher, environ)
    reading = reading.with_topology(**given)
    if address is not None:
        host, port = parse_address(address)
        reading = replace(reading, host=host, port=port, agent_store=False)
    return reading
