"""How two processes on different hosts prove to each other that they know the key of a connection.

They are two ranks, or the watchdogs of two hosts, with the number of the host in place of the rank.
1. The connecting rank sends a nonce and its group rank.
2. The accepting rank answers with a nonce of its own, and the code of both nonces and the rank.
3. The connecting rank answers with another code of them.

Nothing else is read before the third message, of fixed size, is correct. A message that was recorded does not help: its
nonces were others.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from typing import Final

from rankwise._net.acceptor import Client
from rankwise._net.job_secret import CODE_BYTES, JobSecret, code

_NONCE_BYTES: Final = 16
_HELLO: Final = struct.Struct(f"<{_NONCE_BYTES}sI")
_PROOF_BYTES: Final = _HELLO.size + CODE_BYTES
_ANSWER_BYTES: Final = _NONCE_BYTES + CODE_BYTES
_PURPOSE: Final = "connection between ranks"


def connection_key(secret: JobSecret | None, published: bytes) -> bytes:
    """Return the key of the connections to a rank.

    Args:
        secret: The secret of the job; None without one: then whoever can read the store can compute the key.
        published: What the rank has written to the store for this purpose.
    """
    return code(published, _PURPOSE) if secret is None else secret.code(_PURPOSE, published)


class AcceptedProofs:
    """The proofs of the ranks that connect to a listening one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonces: dict[Client, bytes] = {}

    def missing(self, client: Client) -> int:
        """Return how many bytes a client still has to send: what follows are frames, which others read."""
        return _PROOF_BYTES - len(client.received)

    def rank_of(self, client: Client) -> int | None:
        """Return the group rank that a client has proven to be, -1 if its proof is wrong; None if it is incomplete."""
        if len(client.received) < _HELLO.size:
            return None
        hello = bytes(client.received[: _HELLO.size])
        if client not in self._nonces:
            nonce = self._nonces[client] = os.urandom(_NONCE_BYTES)
            try:
                client.connection.sendall(nonce + code(self._key, "accepting", hello, nonce))
            except OSError:  # it has disconnected
                return -1
        if self.missing(client):
            return None
        proof = bytes(client.received[_HELLO.size :])
        if not hmac.compare_digest(proof, code(self._key, "connecting", hello, self._nonces[client])):
            return -1
        return int(_HELLO.unpack(hello)[1])

    def forget(self, client: Client) -> None:
        """Forget a client, whose connection is closed."""
        self._nonces.pop(client, None)


def send_hello(connection: socket.socket, group_rank: int) -> bytes:
    """Send the first message, as the member that connects, and return it."""
    hello = _HELLO.pack(os.urandom(_NONCE_BYTES), group_rank)
    connection.sendall(hello)
    return hello


def send_proof(connection: socket.socket, key: bytes, hello: bytes) -> bool:
    """Send the last message, if the other side has proven that it knows the key; return whether it has.

    Raises:
        OSError: The connection was closed, or there was no answer before the timeout of the socket.
    """
    answer = bytearray()
    while len(answer) < _ANSWER_BYTES:
        piece = connection.recv(_ANSWER_BYTES - len(answer))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        answer += piece
    nonce, proof = bytes(answer[:_NONCE_BYTES]), bytes(answer[_NONCE_BYTES:])
    if not hmac.compare_digest(proof, code(key, "accepting", hello, nonce)):
        return False
    connection.sendall(code(key, "connecting", hello, nonce))
    return True
