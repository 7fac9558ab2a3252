"""The handshake of the ranks at an endpoint, before there is a store or a process group.

It is used where no launcher's agent hosts a store; rank zero listens. A `TCPStore` client would write into any store
that it reached, and would hang forever on a silent port. So a rank does not start with one:
1. It sends a nonce, and the listener proves with the endpoint's key that it is rank zero of the same world.
2. It sends a `JoinRequest` on the same connection.
3. When all ranks have done so, rank zero sends each a `JoinReply`, with the port of its store.

The connections stay open as long as the session, so that rank zero knows which ranks still need its store. If the job
has a secret, the rank also answers a nonce of rank zero, before its request. Otherwise the proof protects against
accidents, not against attackers: anyone who can guess the name of the job can join.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import time
from collections.abc import Sequence
from typing import Final

from rankwise._net.acceptor import Acceptor, Client, listen
from rankwise._net.addresses import address_for_others
from rankwise._net.json_lines import decode_one_of, encode_line
from rankwise._rendezvous.endpoint import Endpoint
from rankwise._rendezvous.membership import JoinReply, JoinRequest, conflict, job_conflict, missing, replies_to
from rankwise._rendezvous.rank_zero import (
    MAX_LINE,
    PROTOCOL,
    CounterProof,
    Proof,
    Question,
    answer_to,
    find_rank_zero,
    proof,
    read_line,
    send_line,
)
from rankwise.errors import JoinError, JoinTimeoutError

# Rank zero knows which ranks are missing, so the others wait for its reply longer than rank zero waits for them.
REPLY_SECONDS: Final = 5.0
# How long rank zero tries a port again that is taken, and how often.
_TAKEN_SECONDS: Final = 3.0
_RETRY_SECONDS: Final = 0.1
# What rank zero receives.
_FROM_RANKS: Final[Sequence[type[Question | CounterProof | JoinRequest]]] = (Question, CounterProof, JoinRequest)


def serve(
    listener: socket.socket, endpoint: Endpoint, request: JoinRequest, *, store_port: int, timeout: float
) -> tuple[JoinReply, dict[int, socket.socket]]:
    """Run the handshake as rank zero. The listening socket stays open.

    Returns:
        The reply for rank zero itself, and the open connection to each other rank.

    Raises:
        JoinError: The ranks do not form one world. Every rank that arrived receives the message.
        JoinTimeoutError: Some ranks did not arrive in time. Every rank that arrived receives the message.
    """
    with Acceptor([listener]) as acceptor:
        server = _Server(endpoint, request, acceptor)
        try:
            server.receive_all(timeout=timeout)
        except JoinError as error:
            server.reply_to_all(JoinReply(error=str(error), late=isinstance(error, JoinTimeoutError)))
            raise
        address = address_for_others(client.connection for client in server.clients)
        replies = replies_to(server.requests, store_port=store_port, host_address=address)
        for client, rank in server.clients.items():
            _reply(client, replies[rank])
        if replies[request.rank].error:
            return replies[request.rank], {}
        connections = {rank: acceptor.release(client) for client, rank in server.clients.items()}
    for connection in connections.values():
        connection.setblocking(True)
    return replies[request.rank], connections


class _Server:
    """The state of the handshake on rank zero.

    Attributes:
        requests: The request of each rank that has arrived, rank zero included.
        clients: The other ranks that have arrived, by connection.
    """

    def __init__(self, endpoint: Endpoint, own: JoinRequest, acceptor: Acceptor) -> None:
        self._endpoint = endpoint
        self._own = own
        self._acceptor = acceptor
        self.requests = {own.rank: own}
        self.clients: dict[Client, int] = {}
        self._refused: list[Client] = []
        self._nonces: dict[Client, tuple[str, str]] = {}
        self._trusted: set[Client] = set()

    def receive_all(self, *, timeout: float) -> None:
        """Receive the request of every rank.

        Raises:
            JoinError: The ranks do not form one world.
            JoinTimeoutError: Some ranks did not arrive in time.
        """
        deadline = time.monotonic() + timeout
        while len(self.requests) < self._own.world_size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                absent = missing(self.requests, self._own.world_size, timeout=timeout)
                raise JoinTimeoutError(absent + self._acceptor.rejected_text())
            for client in self._acceptor.wait(remaining):
                if not self._receive(client):
                    self._drop(client)

    def reply_to_all(self, reply: JoinReply) -> None:
        """Send the same reply to every client that has sent a request."""
        for client in (*self.clients, *self._refused):
            _reply(client, reply)

    def _receive(self, client: Client) -> bool:
        """Process the lines that a client has sent; return False if it disconnected, or is not a rank.

        Raises:
            JoinError: Its request conflicts with another rank's.
        """
        if not client.read() or len(client.received) > MAX_LINE:
            return False
        *lines, rest = client.received.split(b"\n")
        client.received = rest
        for line in lines:
            try:
                message = decode_one_of(_FROM_RANKS, bytes(line))
                if isinstance(message, (Question, CounterProof)):
                    self._prove(client, message)
                    continue
                if self._endpoint.has_secret and client not in self._trusted:
                    return False
            except (ValueError, OSError):
                return False
            if client in self.clients:
                return False  # a rank sends one request
            if problem := job_conflict(self._own, message):
                _reply(client, JoinReply(error=problem))
                return False
            self._admit(client, message)
        return True

    def _prove(self, client: Client, message: Question | CounterProof) -> None:
        """Answer a nonce, or check the answer to one.

        Raises:
            ValueError: The answer is wrong, or of another protocol.
            OSError: The client has disconnected.
        """
        if message.protocol != PROTOCOL:
            raise ValueError(f"{message.protocol} is another protocol")
        if isinstance(message, Question):
            own = os.urandom(16).hex()
            self._nonces[client] = message.nonce, own
            send_line(client.connection, encode_line(Proof(proof(self._endpoint, message.nonce), own)))
            return
        if client not in self._nonces:
            raise ValueError("an answer to no nonce")
        expected = answer_to(self._endpoint, *self._nonces[client])
        if not hmac.compare_digest(message.answer.encode(), expected.encode()):
            raise ValueError("the answer is wrong")
        self._trusted.add(client)

    def _admit(self, client: Client, request: JoinRequest) -> None:
        self._acceptor.identify(client)
        known = self.requests.get(request.rank)
        problem = conflict(self._own, request) or ("" if known is None else conflict(known, request))
        if problem:
            self._refused.append(client)
            raise JoinError(problem)
        self.requests[request.rank] = request
        self.clients[client] = request.rank

    def _drop(self, client: Client) -> None:
        """Close a connection; a rank that has disconnected may connect again."""
        self._acceptor.reject(client)
        self._nonces.pop(client, None)
        if client in self.clients:
            del self.requests[self.clients.pop(client)]


def connect(endpoint: Endpoint, request: JoinRequest, *, timeout: float) -> tuple[JoinReply, socket.socket]:
    """Run the handshake as a rank other than zero.

    Returns:
        Rank zero's reply, and the open connection to it.

    Raises:
        JoinError: Rank zero closed the connection before it replied.
        JoinTimeoutError: Rank zero was not found, or did not reply, in time.
    """
    deadline = time.monotonic() + timeout
    connection, port = find_rank_zero(endpoint, deadline, timeout=timeout)
    try:
        send_line(connection, request.encode())
        text = read_line(connection, deadline + REPLY_SECONDS)
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
            f"rank zero at {endpoint.host}:{port} closed the connection while rank {request.rank} waited for the "
            "others; see its output"
        )
    connection.setblocking(True)
    try:
        return JoinReply.decode(text), connection
    except JoinError:
        connection.close()
        raise


def listen_at(endpoint: Endpoint) -> socket.socket:
    """Listen on the first free port of the endpoint, as rank zero.

    A port that is taken is tried again for some seconds: what holds it may be a connection that has ended just now.

    Raises:
        JoinError: All ports are taken, or this process is not allowed to use them.
    """
    deadline = time.monotonic() + _TAKEN_SECONDS
    while True:
        for port in endpoint.ports:
            try:
                return listen(port, one_host=endpoint.one_host)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise JoinError(f"rank zero cannot listen on {endpoint}: {error.strerror}") from error
        if time.monotonic() > deadline:
            break
        time.sleep(_RETRY_SECONDS)
    raise JoinError(
        f"rank zero cannot listen on {endpoint}: another program or job has the port; "
        "choose another MASTER_PORT, or end what holds it"
    )


def _reply(client: Client, reply: JoinReply) -> None:
    with contextlib.suppress(OSError):  # the client has disconnected, and needs no reply
        send_line(client.connection, reply.encode())
