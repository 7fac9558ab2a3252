"""Finding rank zero: of all that listens at an endpoint, only rank zero of the same world can prove that it is that."""

from __future__ import annotations

import hmac
import os
import socket
import time
from contextlib import closing
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from rankwise._net.connecting import Target, connections, resolve, resolved_text
from rankwise._net.job_secret import SECRET, code
from rankwise._net.json_lines import decode_line, encode_line
from rankwise._rendezvous.endpoint import Endpoint
from rankwise.errors import JoinError, JoinTimeoutError

PROTOCOL: Final = "rankwise/1"

# Lines of the protocol are short: a client that sends more is not a rank.
MAX_LINE: Final = 65536
# How long a listener may take for its proof, and the pause between two rounds over all ports.
_PROOF_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 0.05
# How long the listener on the only port may be rank zero of a world with another key, which is about to end perhaps.
_OTHER_KEY_SECONDS: Final = 3.0
# The name of a host may not resolve while the pods of a cluster are still being created.
_RESOLVE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Question:
    """From a rank to what listens at the endpoint: prove that you are rank zero of my world."""

    protocol: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The answer of rank zero, with a nonce of its own: where there is a secret, the other rank has to prove it too."""

    proof: str
    nonce: str


@dataclass(frozen=True, slots=True)
class CounterProof:
    """The answer to that."""

    protocol: str
    answer: str


class _Answer(Enum):
    """What a listener answers to the question whether it is rank zero."""

    PROOF = auto()
    OTHER_KEY = auto()
    NONE = auto()


def find_rank_zero(endpoint: Endpoint, deadline: float, *, timeout: float) -> tuple[socket.socket, int]:
    """Connect to rank zero, which listens on one of the ports; return the connection and the port.

    If the world has a secret, this side has proven then that it knows it.

    Ports that refuse, and those of other programs, are tried again until the deadline: rank zero may start later.

    Raises:
        JoinError: The host cannot be resolved, or rank zero has another secret.
        JoinTimeoutError: Rank zero was not found in time.
    """
    foreign_ports: set[int] = set()
    other_key_since = float("inf")
    failures = ["nobody listens there"]
    resolve_until = min(deadline, time.monotonic() + _RESOLVE_SECONDS)
    while True:
        with closing(connections(_targets(endpoint, resolve_until), _PROOF_SECONDS, failures)) as established:
            for connection in established:
                port = connection.getpeername()[1]
                answer = _ask(connection, endpoint)
                if answer is _Answer.PROOF:
                    return connection, port
                connection.close()
                foreign_ports.add(port)
                is_other_key = answer is _Answer.OTHER_KEY
                other_key_since = min(other_key_since, time.monotonic()) if is_other_key else float("inf")
        if len(endpoint.ports) == 1 and time.monotonic() - other_key_since > _OTHER_KEY_SECONDS:
            raise _other_key(endpoint)
        if time.monotonic() > deadline:
            break
        del failures[:-1]
        time.sleep(_RETRY_SECONDS)
    failure = failures[-1]
    if foreign_ports:
        ports = ", ".join(map(str, sorted(foreign_ports)))
        failure = f"the listener on port {ports} is not rank zero of this world but another program or job"
        if endpoint.has_secret:
            failure += f", or has another {SECRET}"
    raise JoinTimeoutError(
        f"rank zero was not found at {endpoint} within {timeout:g} s: {failure}{resolved_text(endpoint.host)}. "
        "Was it started, and can this host reach it?"
    )


def _targets(endpoint: Endpoint, deadline: float) -> list[Target]:
    """Return the addresses and ports of an endpoint; none if its host cannot be resolved yet.

    Raises:
        JoinError: It cannot be resolved, and the deadline has passed; or it is no name of a host.
    """
    try:
        return resolve((endpoint.host, *endpoint.other_hosts), endpoint.ports)
    except OSError as error:
        if time.monotonic() <= deadline:
            return []
        raise JoinError(
            f"host {endpoint.host!r} of {endpoint} cannot be resolved: {error.strerror}; "
            "is it spelled right, and known on this host?"
        ) from error
    except UnicodeError as error:
        raise JoinError(f"host {endpoint.host!r} of {endpoint} is not a valid name of a host: {error}") from error


def _other_key(endpoint: Endpoint) -> JoinError:
    """Return the error that rank zero has another secret. Nobody else can have its only port as long as it runs."""
    own = f"the {SECRET} of this rank" if endpoint.has_secret else f"this rank, which has no {SECRET}"
    return JoinError(
        f"rank zero at {endpoint} does not belong to the job of this rank: it has another secret than {own}, or it is "
        f"of another job; give all hosts the same {SECRET}, or this job another port"
    )


def _ask(connection: socket.socket, endpoint: Endpoint) -> _Answer:
    """Return what the listener answers; after a proof, this rank has proven itself too."""
    nonce = os.urandom(16).hex()
    connection.settimeout(_PROOF_SECONDS)
    try:
        send_line(connection, encode_line(Question(PROTOCOL, nonce)))
        found = decode_line(Proof, read_line(connection, time.monotonic() + _PROOF_SECONDS) or "")
        expected = proof(endpoint, nonce)
        if len(found.proof) != len(expected):
            return _Answer.NONE
        if not hmac.compare_digest(found.proof.encode(), expected.encode()):
            return _Answer.OTHER_KEY
        if endpoint.has_secret:
            send_line(connection, encode_line(CounterProof(PROTOCOL, answer_to(endpoint, nonce, found.nonce))))
    except (OSError, JoinTimeoutError, ValueError):
        return _Answer.NONE
    return _Answer.PROOF


def proof(endpoint: Endpoint, nonce: str) -> str:
    """Return what rank zero answers to a nonce, which only those can compute who know the key of the world."""
    return code(endpoint.key.encode(), "rank zero", nonce.encode()).hex()


def answer_to(endpoint: Endpoint, nonce: str, nonce_of_zero: str) -> str:
    """Return what another rank answers to a nonce of rank zero: no code that rank zero would compute for a stranger."""
    return code(endpoint.key.encode(), "another rank", nonce.encode(), nonce_of_zero.encode()).hex()


def send_line(connection: socket.socket, line: str) -> None:
    """Send a line."""
    connection.sendall(line.encode() + b"\n")


def read_line(connection: socket.socket, deadline: float) -> str | None:
    """Read one line; None if the other side closed the connection.

    Raises:
        JoinTimeoutError: No complete line arrived in time.
    """
    received = bytearray()
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or len(received) > MAX_LINE:
            raise JoinTimeoutError("no answer in time")
        connection.settimeout(min(remaining, 1.0))
        try:
            part = connection.recv(MAX_LINE)
        except TimeoutError:
            continue
        except ConnectionError:
            return None
        if not part:
            return None
        received += part
        if b"\n" in received:
            return received.partition(b"\n")[0].decode(errors="replace")
