"""How the ranks of a world find each other at an endpoint, before there is a store or a process group.

Where no launcher's agent hosts a store, rank zero listens. A `TCPStore` client would write into whatever store it met
and hang for good on a port that is silent, so ranks do not start with one: each first asks whoever listens to prove
that it is rank zero of the same world. They say hello on that connection; once all are there, rank zero answers all,
says where its store is. The connections stay open as long as the session: so rank zero knows who still needs it.

The proof keeps accidents out, not attackers: who can guess the job's name can join.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import socket
import time
from typing import Final

from rankwise._net.acceptor import Acceptor, Client, listen
from rankwise._net.json_lines import fields_of
from rankwise._rendezvous.endpoint import Endpoint
from rankwise._rendezvous.membership import JoinReply, JoinRequest, another_job, answers, conflict, missing
from rankwise.errors import JoinError, JoinTimeoutError

PROTOCOL: Final = "rankwise/1"

# Rank zero knows who is missing: the others wait for its word that much longer than for the meeting itself.
ANSWER_SECONDS: Final = 5.0
# A line of the protocol is short; whoever sends more is a stranger.
_MAX_LINE: Final = 65536
# How long a listener has to prove itself before the next port is tried, and how long to wait between rounds.
_PROOF_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.05
# A host name may not resolve yet while the pods of a cluster are still being made.
_RESOLVE_SECONDS: Final = 30.0


def host(
    listener: socket.socket, endpoint: Endpoint, hello: JoinRequest, *, store_port: int, timeout: float
) -> tuple[JoinReply, dict[int, socket.socket]]:
    """Let the other ranks arrive, as rank zero. The listening socket stays open.

    Returns:
        The answer for rank zero, and the open connection to each other rank.

    Raises:
        JoinError: The ranks do not make one world. All that arrived are told.
        JoinTimeoutError: Some did not arrive in time. All that arrived are told.
    """
    with Acceptor([listener]) as acceptor:
        meeting = _Meeting(endpoint, hello, acceptor)
        try:
            meeting.receive_all(timeout=timeout)
        except JoinError as error:
            meeting.answer_all(JoinReply(error=str(error), late=isinstance(error, JoinTimeoutError)))
            raise
        given = answers(meeting.hellos, store_port=store_port)
        for guest, rank in meeting.guests.items():
            _answer(guest, given[rank])
        if given[hello.rank].error:
            return given[hello.rank], {}
        lines = {rank: acceptor.release(guest) for guest, rank in meeting.guests.items()}
    for line in lines.values():
        line.setblocking(True)
    return given[hello.rank], lines


class _Meeting:
    """The meeting as rank zero sees it.

    Attributes:
        hellos: What each rank that is here has said, rank zero included.
        guests: The others' ranks, by connection.
    """

    def __init__(self, endpoint: Endpoint, own: JoinRequest, acceptor: Acceptor) -> None:
        self._endpoint = endpoint
        self._own = own
        self._acceptor = acceptor
        self.hellos = {own.rank: own}
        self.guests: dict[Client, int] = {}
        self._refused: list[Client] = []

    def receive_all(self, *, timeout: float) -> None:
        """Receive the hello of every rank.

        Raises:
            JoinError: The ranks do not make one world.
            JoinTimeoutError: Some did not come in time.
        """
        deadline = time.monotonic() + timeout
        while len(self.hellos) < self._own.world_size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                absent = missing(self.hellos, self._own.world_size, timeout=timeout)
                raise JoinTimeoutError(absent + self._acceptor.rejected_text())
            for client in self._acceptor.wait(remaining):
                if not self._hear(client):
                    self._let_go(client)

    def answer_all(self, answer: JoinReply) -> None:
        """Give all who have said hello the same answer."""
        for guest in (*self.guests, *self._refused):
            _answer(guest, answer)

    def _hear(self, client: Client) -> bool:
        """Take in what somebody has sent; False if it has left, or is a stranger.

        Raises:
            JoinError: It is a rank, but of another world.
        """
        if not client.read() or len(client.received) > _MAX_LINE:
            return False
        *lines, rest = client.received.split(b"\n")
        client.received = rest
        for line in lines:
            try:
                said = fields_of(bytes(line))
                if said.get("protocol") == PROTOCOL:
                    _send(client.connection, json.dumps({"proof": _proof(self._endpoint, said["nonce"])}))
                    continue
                hello = JoinRequest.decode(bytes(line))
            except (ValueError, KeyError, AttributeError, OSError):
                return False
            if client in self.guests:
                return False  # a rank says hello once
            if problem := another_job(self._own, hello):
                _answer(client, JoinReply(error=problem))
                return False
            self._admit(client, hello)
        return True

    def _admit(self, client: Client, hello: JoinRequest) -> None:
        self._acceptor.identify(client)
        known = self.hellos.get(hello.rank)
        problem = conflict(self._own, hello) or ("" if known is None else conflict(known, hello))
        if problem:
            self._refused.append(client)
            raise JoinError(problem)
        self.hellos[hello.rank] = hello
        self.guests[client] = hello.rank

    def _let_go(self, client: Client) -> None:
        """Close a connection; a rank that has left may come again."""
        self._acceptor.reject(client)
        if client in self.guests:
            del self.hellos[self.guests.pop(client)]


def attend(endpoint: Endpoint, hello: JoinRequest, *, timeout: float) -> tuple[JoinReply, socket.socket]:
    """Arrive at rank zero, as any other rank.

    Returns:
        Rank zero's answer, and the open connection to it.

    Raises:
        JoinError: Rank zero went away before it answered.
        JoinTimeoutError: Rank zero was not found, or did not answer, in time.
    """
    deadline = time.monotonic() + timeout
    connection, port = _find(endpoint, deadline, timeout=timeout)
    try:
        _send(connection, hello.encode())
        text = _read_line(connection, deadline + ANSWER_SECONDS)
    except JoinTimeoutError as error:
        connection.close()
        raise JoinTimeoutError(
            f"rank zero at {endpoint.host}:{port} was found, but not all ranks within {timeout:g} s; "
            "its own message names those that are missing"
        ) from error
    except OSError:
        text = None
    if text is None:
        connection.close()
        raise JoinError(
            f"rank zero at {endpoint.host}:{port} closed the connection while rank {hello.rank} waited for the others; "
            "see what it printed"
        )
    connection.setblocking(True)
    try:
        return JoinReply.decode(text), connection
    except JoinError:
        connection.close()
        raise


def listen_at(endpoint: Endpoint) -> socket.socket:
    """Listen on the first free port of the endpoint, as rank zero.

    Raises:
        JoinError: All are taken, or cannot be had.
    """
    for port in endpoint.ports:
        try:
            return listen(port, one_host=endpoint.one_host)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise JoinError(f"rank zero cannot listen on {endpoint}: {error.strerror}") from error
    raise JoinError(
        f"rank zero cannot listen on {endpoint}: another program or job has the port; "
        "choose another MASTER_PORT, or end what holds it"
    )


def _answer(guest: Client, answer: JoinReply) -> None:
    with contextlib.suppress(OSError):  # it has left, and needs no answer
        _send(guest.connection, answer.encode())


def _find(endpoint: Endpoint, deadline: float, *, timeout: float) -> tuple[socket.socket, int]:
    """Connect to rank zero, wherever it listens; ports that are refused or a stranger's are tried again in turn."""
    strangers: set[int] = set()
    resolve_until = min(deadline, time.monotonic() + _RESOLVE_SECONDS)
    failure = "nobody listens there"
    while True:
        for port in endpoint.ports:
            try:
                connection = socket.create_connection((endpoint.host, port), timeout=_PROOF_SECONDS)
            except socket.gaierror as error:
                if time.monotonic() > resolve_until:
                    raise JoinError(
                        f"host {endpoint.host!r} of {endpoint} cannot be resolved: {error.strerror}; "
                        "is it spelled right, and known on this host?"
                    ) from error
                break
            except UnicodeError as error:
                raise JoinError(
                    f"host {endpoint.host!r} of {endpoint} is no name that a host can have: {error}"
                ) from error
            except OSError as error:
                failure = error.strerror or str(error)
                continue
            if _proves(connection, endpoint):
                return connection, port
            connection.close()
            strangers.add(port)
        if time.monotonic() > deadline:
            break
        time.sleep(_PAUSE_SECONDS)
    if strangers:
        listens = ", ".join(map(str, sorted(strangers)))
        failure = f"what listens on port {listens} is not rank zero of this world but another program or job"
    raise JoinTimeoutError(
        f"rank zero was not found at {endpoint} within {timeout:g} s: {failure}. "
        "Was it started, and can this host reach it?"
    )


def _proves(connection: socket.socket, endpoint: Endpoint) -> bool:
    """Whether who listens there is rank zero of this world."""
    nonce = os.urandom(16).hex()
    try:
        _send(connection, json.dumps({"protocol": PROTOCOL, "nonce": nonce}))
        text = _read_line(connection, time.monotonic() + _PROOF_SECONDS)
        proof = fields_of(text)["proof"] if text else ""
        return isinstance(proof, str) and hmac.compare_digest(proof, _proof(endpoint, nonce))
    except (OSError, JoinTimeoutError, ValueError, TypeError, KeyError):
        return False


def _proof(endpoint: Endpoint, nonce: str) -> str:
    return hmac.new(endpoint.key.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def _send(connection: socket.socket, line: str) -> None:
    connection.sendall(line.encode() + b"\n")


def _read_line(connection: socket.socket, deadline: float) -> str | None:
    """Read one line; None if the other side closed the connection.

    Raises:
        JoinTimeoutError: It did not come in time.
    """
    received = bytearray()
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or len(received) > _MAX_LINE:
            raise JoinTimeoutError("no answer in time")
        connection.settimeout(min(remaining, 1.0))
        try:
            part = connection.recv(_MAX_LINE)
        except TimeoutError:
            continue
        except ConnectionError:
            return None
        if not part:
            return None
        received += part
        if b"\n" in received:
            return received.partition(b"\n")[0].decode(errors="replace")
