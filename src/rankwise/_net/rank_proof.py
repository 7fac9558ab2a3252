"""How two processes on different hosts prove to each other that they know the key of a connection.

They are two ranks, or the watchdogs of two hosts, with the number of the host in place of the rank.
1. The connecting rank sends its hello: a nonce, its rank, and what the connection is for.
2. The accepting rank answers with a nonce of its own, and the code of the hello and that nonce.
3. The connecting rank answers with another code of them.

Nothing else is read before the third message, of fixed size, is correct. A message that was recorded does not help: its
nonces were others.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from rankwise._net.acceptor import Client
from rankwise._net.job_secret import CODE_BYTES, JobSecret, code

_NONCE_BYTES: Final = 16
_HELLO: Final = struct.Struct(f"<{_NONCE_BYTES}sIQ")
_PROOF_BYTES: Final = _HELLO.size + CODE_BYTES
ANSWER_BYTES: Final = _NONCE_BYTES + CODE_BYTES
_PURPOSE: Final = "connection between ranks"


class Sender(NamedTuple):
    """Who has proven to be at the other end: the rank, -1 if the proof is wrong, and what the connection is for."""

    rank: int
    purpose: int


_STRANGER: Final = Sender(-1, 0)


def connection_key(secret: JobSecret | None, published: bytes) -> bytes:
    """Return the key of the connections to a rank.

    Args:
        secret: The secret of the job; None without one: then whoever can read the store can compute the key.
        published: What the rank has written to the store for this purpose.
    """
    return code(published, _PURPOSE) if secret is None else secret.code(_PURPOSE, published)


def new_hello(rank: int, purpose: int = 0) -> bytes:
    """Return the first message, of the rank that connects."""
    return _HELLO.pack(os.urandom(_NONCE_BYTES), rank, purpose)


def proof_for(answer: bytes, key: bytes, hello: bytes) -> bytes:
    """Return the last message, if the answer to the first one proves that the other side knows the key; else b""."""
    nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    is_known = hmac.compare_digest(proof, code(key, "accepting", hello, nonce))
    return code(key, "connecting", hello, nonce) if is_known else b""


def prove(connection: socket.socket, key: bytes, number: int) -> bool:
    """Prove, on a connection that waits, to be this number; return whether the other side has proven its part.

    Raises:
        OSError: The connection was closed, or there was no answer before the timeout of the socket.
    """
    hello = new_hello(number)
    connection.sendall(hello)
    answer = bytearray()
    while len(answer) < ANSWER_BYTES:
        piece = connection.recv(ANSWER_BYTES - len(answer))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        answer += piece
    proof = proof_for(bytes(answer), key, hello)
    connection.sendall(proof)
    return bool(proof)


class AcceptedProofs:
    """The proofs of the ranks that connect to a listening one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonces: WeakKeyDictionary[Client, bytes] = WeakKeyDictionary()

    def sender(self, client: Client) -> Sender | None:
        """Read what a client has sent, and return who it is; None as long as it has not sent all."""
        # No more than the proof: what follows is for others to read.
        is_connected = client.read(_PROOF_BYTES - len(client.received))
        return self._sender(client) or (None if is_connected else _STRANGER)

    def _sender(self, client: Client) -> Sender | None:
        if len(client.received) < _HELLO.size:
            return None
        hello = bytes(client.received[: _HELLO.size])
        if client not in self._nonces:
            nonce = self._nonces[client] = os.urandom(_NONCE_BYTES)
            try:
                client.connection.sendall(nonce + code(self._key, "accepting", hello, nonce))
            except OSError:  # it has disconnected
                return _STRANGER
        if len(client.received) < _PROOF_BYTES:
            return None
        proof = bytes(client.received[_HELLO.size :])
        if not hmac.compare_digest(proof, code(self._key, "connecting", hello, self._nonces[client])):
            return _STRANGER
        return Sender(*_HELLO.unpack(hello)[1:])
