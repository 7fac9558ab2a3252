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
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Final

from rankwise.errors import JoinError, JoinTimeoutError
from rankwise.rendezvous import LOOPBACK, Endpoint
from rankwise.session.roll_call import Answer, Hello, answers, conflict, missing

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


@dataclass(slots=True)
class _Guest:
    """A connection to rank zero, and what was received of its next line."""

    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None


def host(
    endpoint: Endpoint, hello: Hello, *, store_port: int, timeout: float
) -> tuple[Answer, dict[int, socket.socket]]:
    """Let the other ranks arrive, as rank zero.

    Returns:
        The answer for rank zero, and the open connection to each other rank.

    Raises:
        JoinError: The port is taken, or the ranks do not make one world. All that arrived are told.
        JoinTimeoutError: Some did not arrive in time. All that arrived are told.
    """
    guests: dict[int, _Guest] = {}
    with _listen_at(endpoint) as listener, contextlib.ExitStack() as unless_joined:
        unless_joined.callback(_hang_up, guests)
        try:
            hellos = _receive(listener, guests, endpoint, hello, timeout=timeout)
        except JoinError as error:
            for guest in guests.values():
                _answer(guest, Answer(error=str(error), late=isinstance(error, JoinTimeoutError)))
            raise
        given = answers(hellos, store_port=store_port)
        arrived = {_rank(guest): guest for guest in guests.values() if hellos.get(_rank(guest)) is guest.hello}
        for rank, guest in arrived.items():
            _answer(guest, given[rank])
        if given[hello.rank].error:
            return given[hello.rank], {}
        unless_joined.pop_all()
    lines = {rank: guest.connection for rank, guest in arrived.items()}
    for guest in guests.values():
        if guest.connection in lines.values():
            guest.connection.setblocking(True)
        else:
            guest.connection.close()
    return given[hello.rank], lines


def attend(endpoint: Endpoint, hello: Hello, *, timeout: float) -> tuple[Answer, socket.socket]:
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
    return Answer.decode(text), connection


def listen(port: int, *, one_host: bool) -> socket.socket:
    """Listen on a port, 0 for any: on loopback for ranks of one host, else on all interfaces."""
    if one_host:
        return socket.create_server((LOOPBACK, port), backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)


def _listen_at(endpoint: Endpoint) -> socket.socket:
    """Listen on the first free port of the endpoint."""
    for port in endpoint.ports:
        try:
            return listen(port, one_host=endpoint.one_host)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise JoinError(f"rank zero cannot listen on {endpoint}: {error.strerror}") from error
    raise JoinError(
        f"rank zero cannot listen on {endpoint}: another program has the port; "
        "choose another MASTER_PORT, or end what holds it"
    )


def _hang_up(guests: dict[int, _Guest]) -> None:
    for guest in guests.values():
        guest.connection.close()


def _rank(guest: _Guest) -> int:
    return -1 if guest.hello is None else guest.hello.rank


def _receive(
    listener: socket.socket, guests: dict[int, _Guest], endpoint: Endpoint, own: Hello, *, timeout: float
) -> dict[int, Hello]:
    """Receive the hello of every rank."""
    hellos = {own.rank: own}
    deadline = time.monotonic() + timeout
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(hellos) < own.world_size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise JoinTimeoutError(missing(hellos, own.world_size, timeout=timeout))
            for key, _ in selector.select(min(remaining, 1.0)):
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    guests[connection.fileno()] = _Guest(connection)
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                guest = guests[key.fd]
                if not _progress(guest, endpoint):
                    selector.unregister(guest.connection)
                    del guests[key.fd]
                    guest.connection.close()
                    if guest.hello is not None:  # it said hello and left: it may come again
                        hellos.pop(guest.hello.rank, None)
                elif guest.hello is not None:
                    _admit(hellos, own, guest.hello)
    return hellos


def _admit(hellos: dict[int, Hello], own: Hello, hello: Hello) -> None:
    known = hellos.setdefault(hello.rank, hello)
    problem = conflict(own, hello) or ("" if known is hello else conflict(known, hello))
    if problem:
        raise JoinError(problem)


def _progress(guest: _Guest, endpoint: Endpoint) -> bool:
    """Take in what a guest sent; False if it has left or is a stranger."""
    try:
        received = guest.connection.recv(_MAX_LINE)
    except BlockingIOError:
        return True
    except OSError:
        return False
    guest.received += received
    if not received or len(guest.received) > _MAX_LINE:
        return False
    while b"\n" in guest.received:
        line, _, rest = bytes(guest.received).partition(b"\n")
        guest.received = bytearray(rest)
        try:
            message = json.loads(line)
            if message.get("protocol") == PROTOCOL:
                _send(guest.connection, json.dumps({"proof": _proof(endpoint, message["nonce"])}))
            else:
                guest.hello = Hello(**message)
        except (ValueError, TypeError, KeyError, AttributeError, OSError):
            return False
    return True


def _answer(guest: _Guest, answer: Answer) -> None:
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
        proof = json.loads(text)["proof"] if text else ""
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
