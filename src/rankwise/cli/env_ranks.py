"""The ranks meet as in `init()`, without a process group, and send their reports to rank zero: of `rankwise env --all`.

Where no launcher's agent serves a store, torch is not needed: the reports use the connections of the handshake.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from rankwise._dependencies import require_torch
from rankwise._environment.facts import LaunchEnvironment
from rankwise._net.host import host_id
from rankwise._rendezvous import handshake
from rankwise._rendezvous.endpoint import Endpoint
from rankwise._rendezvous.membership import JoinReply, JoinRequest
from rankwise._rendezvous.mpi import endpoint_over_mpi, needs_mpi
from rankwise._session.environ import read_check
from rankwise._text import ranks_text
from rankwise.cli.env_report import endpoint_of
from rankwise.errors import JoinError, JoinTimeoutError, RankwiseError

if TYPE_CHECKING:
    from torch.distributed import Store

# The most bytes of a report.
_LONGEST: Final = 1 << 20
_OUTCOME: Final = "outcome"


def meeting_point(reading: LaunchEnvironment, *, timeout: float) -> Endpoint | None:
    """Return where the ranks meet, as in `init()`; None for a world of one without an address.

    Raises:
        LauncherEnvironmentError: The address is not set, and cannot be derived.
        JoinError: MPI has no address of rank zero.
    """
    return endpoint_over_mpi(reading, timeout=timeout) if needs_mpi(reading) else endpoint_of(reading)


def gather_reports(
    endpoint: Endpoint,
    reading: LaunchEnvironment,
    report: Callable[[JoinReply], str],
    *,
    command: str,
    timeout: float,
) -> list[str] | None:
    """Send the report of this rank to rank zero; return those of all ranks there, and None on the others.

    Args:
        endpoint: Where the ranks meet.
        reading: This rank.
        report: Returns the report of this rank, a line, given rank zero's reply. It raises the error in it.
        command: The name of the command; other commands of the job do not read its keys in the launcher's store.
        timeout: Seconds in which all ranks have to arrive, and again for their reports.

    Raises:
        JoinError: The ranks could not meet, or one of them ended before it had sent its report.
        JoinTimeoutError: Not all ranks arrived in time; the message names those that are missing.
    """
    request = JoinRequest.of(
        reading, host=socket.gethostname(), host_id=host_id(), process=os.getpid(), check=read_check(), problem=""
    )
    if endpoint.agent_store:
        job = "" if reading.job is None else reading.job.value
        namespace = f"rankwise-{command}/{job}/{reading.attempt}"
        return _gather_over_store(endpoint, request, report, namespace=namespace, timeout=timeout)
    if request.rank:
        _send(endpoint, request, report, timeout=timeout)
        return None
    return _receive_all(endpoint, request, report, timeout=timeout)


def _send(endpoint: Endpoint, request: JoinRequest, report: Callable[[JoinReply], str], *, timeout: float) -> None:
    reply, connection = handshake.connect(endpoint, request, timeout=timeout)
    with connection:
        line = report(reply)
        try:
            connection.settimeout(timeout)
            connection.sendall(f"{line}\n".encode())
            outcome = _read_line(connection, timeout + handshake.REPLY_SECONDS)
        except OSError as error:
            raise JoinError(f"rank zero ended before it had the reports of all ranks: {error}") from error
    _raise_outcome(outcome)


def _receive_all(
    endpoint: Endpoint, request: JoinRequest, report: Callable[[JoinReply], str], *, timeout: float
) -> list[str]:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(handshake.listen_at(endpoint))
        reply, connections = handshake.serve(listener, endpoint, request, store_port=0, timeout=timeout)
        for connection in connections.values():
            stack.enter_context(connection)
        lines = {0: report(reply)}
        deadline = time.monotonic() + timeout
        problem = ""
        for rank, connection in sorted(connections.items()):
            try:
                lines[rank] = _read_line(connection, max(0.1, deadline - time.monotonic()))
            except OSError as error:
                problem = f"rank {rank} of {request.world_size} sent no report: {error}"
                break
        _send_outcome(connections, JoinReply(error=problem))
    if problem:
        raise JoinError(problem)
    return [lines[rank] for rank in range(request.world_size)]


def _send_outcome(connections: Mapping[int, socket.socket], outcome: JoinReply) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):  # it has ended, and needs no outcome
            connection.sendall(f"{outcome.encode()}\n".encode())


def _read_line(connection: socket.socket, seconds: float) -> str:
    """Return the next line of a connection.

    Raises:
        OSError: The connection was closed, or no line arrived in time.
    """
    deadline = time.monotonic() + seconds
    received = bytearray()
    while not received.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(_LONGEST)
        received += piece
        if not piece or len(received) > _LONGEST:
            raise ConnectionResetError("it has closed the connection" if not piece else "its line is too long")
    return received.decode(errors="replace")


def _raise_outcome(line: str | bytes) -> None:
    """Raise the error in rank zero's last message."""
    error = JoinReply.decode(line).error
    if error:
        raise JoinError(error)


def _gather_over_store(
    endpoint: Endpoint, request: JoinRequest, report: Callable[[JoinReply], str], *, namespace: str, timeout: float
) -> list[str] | None:
    require_torch("to meet over the store of this launcher")
    from torch.distributed import PrefixStore  # noqa: PLC0415 - slow, and only needed here

    from rankwise._rendezvous import store  # noqa: PLC0415 - likewise

    agents = store.connect(endpoint.host, endpoint.ports[0], timeout=timeout).store
    reply, own = store.join_over_store(PrefixStore(namespace, agents), request, timeout=timeout)
    try:
        own.set(f"report/{request.rank}", report(reply))
        if request.rank == 0:
            return _collect(own, request.world_size, timeout)
        if not store.wait_for(own, [_OUTCOME], timeout=timeout + handshake.REPLY_SECONDS):
            raise JoinTimeoutError(f"rank zero did not receive all reports within {timeout:g} s; see its output")
        _raise_outcome(own.get(_OUTCOME))
    except RuntimeError as error:
        if isinstance(error, RankwiseError):
            raise
        raise JoinError(f"the store of the launcher failed while the ranks sent their reports: {error}") from error
    return None


def _collect(own: Store, world_size: int, timeout: float) -> list[str]:
    from rankwise._rendezvous import store  # noqa: PLC0415 - it imports torch

    keys = [f"report/{rank}" for rank in range(world_size)]
    if not store.wait_for(own, keys, timeout=timeout):
        absent = [rank for rank, key in enumerate(keys) if not own.check([key])]
        problem = f"{ranks_text(absent)} of {world_size} sent no report within {timeout:g} s"
        own.set(_OUTCOME, JoinReply(error=problem).encode())
        raise JoinTimeoutError(problem)
    reports = [own.get(key).decode(errors="replace") for key in keys]
    own.set(_OUTCOME, JoinReply().encode())
    return reports
