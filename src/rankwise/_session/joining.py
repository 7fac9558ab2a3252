"""How a process joins the other ranks and selects its device, before the process group opens."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from rankwise._environment.facts import Fact, LaunchEnvironment
from rankwise._net.addresses import address_for_others
from rankwise._net.host import address_towards, host_id
from rankwise._net.job_secret import JobSecret
from rankwise._rendezvous import handshake, store
from rankwise._rendezvous.endpoint import Endpoint
from rankwise._rendezvous.membership import JoinReply, JoinRequest
from rankwise._rendezvous.readiness import RankMonitor
from rankwise._rendezvous.signed_store import part_of, signed
from rankwise._session.device import bind, choose_backend, choose_device, uuid_of_device
from rankwise._session.environ import process_variables
from rankwise.errors import JoinError, JoinTimeoutError, RankwiseError

# How long a rank that cannot join waits for the others, to report the reason to them.
_REPORT_SECONDS: Final = 10.0
_SHELL_TEXT: Final = (
    "This may be a shell of srun --pty, which has the variables of one task: start the program with srun there, or "
    "alone with launcher='none'."
)


@dataclass(slots=True)
class Joined:
    """A rank that has joined the others.

    Attributes:
        reading: The launch environment, complete.
        store: The store of the session.
        connections: On rank zero, if it serves the store, the open connection to each other rank; on the others, the
            one to rank zero.
        listener: On rank zero, the socket of the handshake. It stays open until the session is closed: the port may be
            the only difference between two jobs, so the second job must get the error that the port is taken.
        host_address: The address of this host for other hosts, if it has no connection to one; "" if unknown.
        secret: The secret of the job, with which the values in the store are signed; None without one.
        group_store: The part for the process group, which keeps only the part of it that is written in C++.
    """

    reading: LaunchEnvironment
    store: dist.Store
    connections: dict[int, socket.socket]
    listener: socket.socket | None = None
    host_address: str = ""
    secret: JobSecret | None = None
    group_store: dist.Store | None = None

    @property
    def monitor(self) -> RankMonitor:
        """Monitors the other ranks."""
        return RankMonitor(self.reading.rank.value, self.connections)

    def release_port(self) -> None:
        """Stop listening; `shutdown` does so even while a forked child still holds the socket."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()

    def close(self) -> None:
        """Release the port, and close the connections."""
        self.release_port()
        for connection in self.connections.values():
            connection.close()


def join_with_device(
    reading: LaunchEnvironment,
    endpoint: Endpoint,
    backend: str | None,
    device: str | torch.device | None,
    *,
    timeout: float,
    check: bool,
    secret: JobSecret | None,
) -> Joined:
    """Join the other ranks. If the local rank is known and has no device, the join request reports that."""
    chosen: torch.device | None = None
    problem: Exception | None = None
    used, uuid = "", ""
    try:
        # Which device it is depends on the local rank, which may not be known yet; the backend does not.
        own = choose_device(0 if reading.local_rank is None else reading.local_rank.value, device)
        used = choose_backend(backend, own)
        if reading.local_rank is not None or torch.accelerator.device_count() == 1:
            chosen, uuid = own, uuid_of_device(own, backend)
    except Exception as error:  # noqa: BLE001 - raised again below, after it was reported to the others
        problem = error
    request = JoinRequest.of(
        reading,
        host=socket.gethostname(),
        host_id=host_id(),
        process=os.getpid(),
        check=check,
        problem="" if problem is None else _message_for_others(problem),
    )
    request = replace(request, device=str(chosen or ""), device_uuid=uuid, backend=used)
    try:
        seconds = timeout if problem is None else min(timeout, _REPORT_SECONDS)
        return _join(reading, endpoint, request, timeout=seconds, secret=secret)
    except JoinError as error:
        if problem is not None:
            raise problem from problem.__cause__  # not from an error that only says the same
        is_shell = reading.launcher == "slurm" and "SLURM_PTY_PORT" in process_variables()
        if isinstance(error, JoinTimeoutError) and is_shell:
            raise JoinTimeoutError(f"{error} {_SHELL_TEXT}") from None
        raise


def own_address(joined: Joined, endpoint: Endpoint) -> str:
    """Return the address of this host for other hosts: that of a connection to another host, if this rank has one."""
    return (
        address_for_others(joined.connections.values())
        or joined.host_address
        or address_towards(endpoint.host, endpoint.ports[0])
    )


def select_device(
    joined: Joined, backend: str | None, device: str | torch.device | None, *, timeout: float
) -> torch.device:
    """Select this rank's device, and wait until all ranks have selected theirs."""
    problem: Exception | None = None
    own = torch.device("cpu")
    try:
        own = choose_device(joined.reading.known_topology()["local_rank"].value, device)
        choose_backend(backend, own)
        bind(own)
    except Exception as error:  # noqa: BLE001 - raised again below, after it was reported to the others
        problem = error
    try:
        joined.monitor.monitored_barrier("" if problem is None else _message_for_others(problem), timeout=timeout)
    except BaseException as error:
        joined.close()
        if isinstance(error, JoinError) and problem is not None:
            raise problem from None  # the other error has the same text, for the other ranks
        raise
    return own


def _message_for_others(problem: Exception) -> str:
    """Return the message of an error for other ranks, with the class of an error that is not rankwise's own."""
    return str(problem) if isinstance(problem, RankwiseError) else f"{type(problem).__name__}: {problem}"


def _join(
    reading: LaunchEnvironment, endpoint: Endpoint, request: JoinRequest, *, timeout: float, secret: JobSecret | None
) -> Joined:
    """Join the other ranks: over the store of the launcher's agent, or by a handshake with rank zero.

    Raises:
        JoinError: The ranks could not meet, or one of them cannot join.
    """
    if endpoint.agent_store:
        job = "" if reading.job is None else reading.job.value
        agents = store.connect(endpoint.host, endpoint.ports[0], timeout=timeout)
        joint = part_of(signed(agents.store, secret), f"rankwise/{job}/{reading.attempt}")
        request = replace(request, reached=agents.address if agents.own_address else "")
        reply, session_store = store.join_over_store(joint, request, timeout=timeout)
        complete = _environment_of(reading, reply, endpoint, endpoint.ports[0])
        own = agents.own_address or reply.host_address
        return Joined(complete, session_store, {}, host_address=own, secret=secret)
    if request.rank == 0:
        # Before the store, whose own connections get ports too, and might get this one.
        listener = handshake.listen_at(endpoint)
        try:
            session_store, port = store.serve(one_host=endpoint.one_host, timeout=timeout)
            reply, connections = handshake.serve(listener, endpoint, request, store_port=port, timeout=timeout)
            complete = _environment_of(reading, reply, endpoint, listener.getsockname()[1])
        except BaseException:
            listener.close()
            raise
        return Joined(complete, signed(session_store, secret), connections, listener, secret=secret)
    reply, connection = handshake.connect(endpoint, request, timeout=timeout)
    try:
        complete = _environment_of(reading, reply, endpoint, connection.getpeername()[1])
        monitor = RankMonitor(request.rank, {0: connection})
        # At the address that has answered: the name may have others, or only other hosts may resolve it.
        address = connection.getpeername()[0]
        session_store = store.connect(address, reply.store_port, timeout=timeout, lost=lambda: monitor.lost([0])).store
        return Joined(
            complete,
            signed(session_store, secret),
            {0: connection},
            host_address=reply.host_address,
            secret=secret,
        )
    except JoinError:
        connection.close()
        raise


def _environment_of(reading: LaunchEnvironment, reply: JoinReply, endpoint: Endpoint, port: int) -> LaunchEnvironment:
    """Return the environment completed with rank zero's reply and with the address where the ranks met."""
    host = (
        reading.host if reading.host and reading.host.value == endpoint.host else Fact(endpoint.host, endpoint.source)
    )
    return replace(reply.complete(reading), host=host, port=reading.port or Fact(port, endpoint.source))
