"""How this rank makes its connections when they are needed: in the event loop of the session, without waiting.

Of two ranks the higher one connects to the lower one, which has written its address to the store. Each connection is
for one purpose. Both sides prove first that they know its key; on one host, the socket has to belong to the same user
too, whatever other users write to the store. See SECURITY.md.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from torch.distributed import Store

from rankwise._comm.control.links.peer import CLOSED
from rankwise._comm.control.links.places import Places
from rankwise._comm.control.links.sockets import SECRET_BYTES, Address, admit, listen_locally, local_name
from rankwise._net.acceptor import Acceptor, listen
from rankwise._net.job_secret import SECRET, JobSecret
from rankwise._net.json_lines import encode_line
from rankwise._net.polling import SharedEventLoop
from rankwise._net.rank_proof import ANSWER_BYTES, AcceptedProofs, connection_key, new_hello, proof_for
from rankwise._rendezvous.store_reads import longest_pause
from rankwise.errors import CollectiveError, JoinError, RankwiseError

# What a connection is for: the data of the group of this id, or one of these.
FRAMES: Final = (1 << 64) - 1
WATCHERS: Final = (1 << 64) - 2
PAGE: Final = (1 << 64) - 3

# The shortest pause between two looks for an address in the store, and the longest one with few ranks.
_PAUSE_SECONDS: Final = (0.0005, 0.02)
_IN_PROGRESS: Final = frozenset({0, errno.EINPROGRESS})
_TOO_FEW: Final = frozenset({errno.EMFILE, errno.ENFILE})
_RAISE_LIMIT: Final = "raise the limit of file descriptors (ulimit -n)"


@dataclass(slots=True, eq=False)
class _Attempt:
    """The attempt to connect to a rank: it looks for the address, then connects, then proves who it is.

    Attributes:
        due: When to look for the address, or to connect, next; never while the event loop waits for the connection.
        pause: Until the look after that.
        targets: The addresses that are left to connect to, the current one first.
    """

    rank: int
    purpose: int
    due: float = 0.0
    pause: float = _PAUSE_SECONDS[0]
    where: str = ""
    targets: list[tuple[int, Any]] = field(default_factory=list)
    connection: socket.socket | None = None
    key: bytes = b""
    hello: bytes = b""
    answer: bytearray = field(default_factory=bytearray)


class Connector:
    """Makes connections, each for a rank and a purpose.

    Attributes:
        loop: The event loop.
        expected: The connections that `made` gets, by rank and purpose; all others are for `on_made` to take.
        made: Connections that nobody uses now.
        shortage: Why this rank accepts no connections any more; "" if it does.
    """

    def __init__(
        self,
        loop: SharedEventLoop,
        *,
        store: Store,
        rank: int,
        key: str,
        secret: JobSecret | None = None,
        places: Places,
        own_address: Callable[[], str] = str,
        on_made: Callable[[int, int, socket.socket], bool] = lambda *_: False,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        """Make no connections yet.

        Args:
            loop: The event loop, which is the caller's to close, before this.
            store: The store that the ranks share.
            rank: The global rank of this process.
            key: The key of addresses in the store, before the rank.
            secret: The secret of the job; None without one.
            places: The hosts of the ranks.
            own_address: Returns the name or address of this host for other hosts.
            on_made: Takes a connection, for a rank and a purpose; returns whether it wants it.
            on_failure: Called when `failure` returns something new.
        """
        self.expected: set[tuple[int, int]] = set()
        self.made: dict[tuple[int, int], socket.socket] = {}
        self.shortage = ""
        self.loop = loop
        self._store = store
        self._rank = rank
        self._key = key
        self._secret = secret
        self._places = places
        self._is_one_host = places.num_hosts == 1
        self._longest_pause = longest_pause(_PAUSE_SECONDS[1], len(places.ranks))
        self._own_address = own_address
        self._on_made = on_made
        self._on_failure = on_failure
        self._lock = threading.RLock()
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._failures: dict[tuple[int, int], str] = {}
        self._addresses: dict[int, Address] = {}
        self._taken: set[socket.socket] = set()
        self._listeners: list[socket.socket] = []
        self._acceptor: Acceptor | None = None
        self._proofs = AcceptedProofs(b"")

    def listen(self) -> None:
        """Accept connections, if this rank does not yet, and let the others know where. Local; does not wait.

        Raises:
            CollectiveError: No file descriptors are left.
        """
        with self._lock:
            if self._acceptor is not None:
                return
            listeners = self._listeners
            try:
                if self.shortage:
                    raise OSError(self.shortage)  # noqa: TRY301 - handled like the shortage itself
                listeners.append(listen_locally())
                if not self._is_one_host:
                    listeners.append(listen(0, one_host=False))
                published = secrets.token_bytes(SECRET_BYTES)
                self._proofs = AcceptedProofs(connection_key(self._secret, published))
                self._acceptor = Acceptor(listeners, admits=admit, loop=self.loop, run=self._serve)
            except OSError as error:
                while listeners:
                    listeners.pop().close()
                raise CollectiveError(
                    f"rank {self._rank} cannot accept connections of other ranks: {_text(error)}"
                ) from error
            address = Address(
                local=local_name(listeners[0]),
                remote="" if self._is_one_host else self._own_address(),
                port=0 if self._is_one_host else listeners[1].getsockname()[1],
                secret=published.hex(),
            )
        self._store.set(f"{self._key}/{self._rank}", encode_line(address))

    def request(self, rank: int, purpose: int) -> None:
        """Begin to make a connection; this rank listens, or connects when it finds the address of the other one."""
        with self._lock:
            place = rank, purpose
            # It may have been made since the caller looked: a second one would take its place at the other side.
            if place in self._attempts or place in self.made or self.failure(*place):
                return
            if rank < self._rank:
                self._attempts[place] = _Attempt(rank, purpose)
                return
        try:
            self.listen()
        except CollectiveError as error:
            self._note_failure(place, f"cannot be accepted: {error}")

    def failure(self, rank: int, purpose: int) -> str:
        """Return why there is no such connection, and will be none; "" if there may be one."""
        found = self._failures.get((rank, purpose), "")
        return found or (f"cannot be accepted: {self.shortage}" if self.shortage and rank > self._rank else "")

    def where(self, rank: int, purpose: int) -> str:
        """Return the address at which this rank tries to reach another one; "" if it has not found it."""
        attempt = self._attempts.get((rank, purpose))
        return "" if attempt is None else attempt.where

    def rejected_text(self) -> str:
        """Return a sentence about connections that were no rank's; "" if there were none."""
        return "" if self._acceptor is None else self._acceptor.rejected_text()

    def take(self, rank: int, purpose: int, *, again: bool = False) -> socket.socket | None:
        """Return the connection for a purpose, which the caller gives back, or drops; None while there is none.

        Args:
            rank, purpose: The rank, and the purpose.
            again: Make a connection also where that has failed before.
        """
        place = rank, purpose
        with self._lock:
            if again:
                self._failures.pop(place, None)
            connection = self.made.pop(place, None)
            if connection is not None and _has_ended(connection):
                connection.close()
                if rank > self._rank:  # unless that one connects again
                    self._failures[place] = CLOSED
                connection = None
            if connection is not None:
                self._taken.add(connection)
                return connection
        self.request(rank, purpose)
        return None

    def give_back(self, rank: int, purpose: int, connection: socket.socket) -> None:
        """Keep a connection that was taken for the next use, unless the other side has made a new one."""
        with self._lock:
            self._taken.discard(connection)
            if (rank, purpose) in self.made:
                connection.close()
            else:
                self.made[rank, purpose] = connection

    def drop(self, connection: socket.socket) -> None:
        """Close a connection that was taken."""
        with self._lock:
            self._taken.discard(connection)
            connection.close()

    def keep(self, rank: int, purpose: int, connection: socket.socket) -> None:
        """Keep a new connection until it is taken; it replaces one that the other side has given up."""
        with self._lock:
            old = self.made.pop((rank, purpose), None)
            if old is not None:
                old.close()
            self.made[rank, purpose] = connection
            self._failures.pop((rank, purpose), None)

    def forget(self, purpose: int) -> None:
        """Close the connections for a purpose, and make no more."""
        with self._lock:
            for place in [place for place in self.made if place[1] == purpose]:
                self.made.pop(place).close()
            for place in [place for place in self._attempts if place[1] == purpose]:
                self._disconnect(self._attempts.pop(place))
            for place in [place for place in self._failures if place[1] == purpose]:
                del self._failures[place]

    def wait(self, seen: int, seconds: float) -> bool:
        """Wait for an event, as `SharedEventLoop.wait` does, and meanwhile look for addresses."""
        end = time.monotonic() + seconds
        self._step()
        while not self.loop.wait(seen, self._pause(max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
            self._step()
        return True

    def close(self) -> None:
        """Close everything, after the event loop. A forked child calls this too, so it takes no lock."""
        if self._acceptor is not None:
            self._acceptor.close()
        # These refer to what has this connector. The garbage collector would free the store of such a cycle later,
        # perhaps in a forked child: there its destructor waits forever for a thread that only the parent has.
        self._acceptor = None
        self._on_made, self._on_failure = (lambda *_: False), (lambda: None)
        opened = [attempt.connection for attempt in self._attempts.values()]
        for each in (*self._listeners, *opened, *self.made.values(), *self._taken):
            if each is not None:
                each.close()
        self.made.clear()
        self._attempts.clear()

    def _step(self) -> None:
        """Do what the event loop does not: look for addresses in the store, and reject clients that are silent."""
        if not self._attempts and self._acceptor is None:
            return
        now = time.monotonic()
        with self._lock:
            self._serve(lambda: None)
            due = [attempt for attempt in self._attempts.values() if attempt.due <= now]
            for attempt in due:  # until then, for no other thread
                attempt.due = now + attempt.pause
                attempt.pause = min(2 * attempt.pause, self._longest_pause)
        for attempt in due:
            self._look(attempt)

    def _pause(self, seconds: float) -> float:
        """Return how long to wait at most before the next `_step`: no longer than so many seconds."""
        if not self._attempts:
            return seconds
        with self._lock:
            first = min((attempt.due for attempt in self._attempts.values()), default=float("inf"))
        return min(seconds, max(0.0, first - time.monotonic()))

    def _look(self, attempt: _Attempt) -> None:
        """Look for the address of a rank, without a lock, and begin to connect if it is there."""
        is_local = self._places.host(attempt.rank) == self._places.host(self._rank)
        problem = ""
        try:
            address = self._address(attempt.rank)
            if address is None:
                return
            attempt.where = address.local if is_local else f"{address.remote}:{address.port}"
            targets = address.targets(is_local=is_local)
        except ValueError as error:
            problem = f"its address in the store cannot be read: {error}; does another program use the store?"
        except OSError as error:  # there is no such host
            problem = str(error)
        except (RuntimeError, RankwiseError) as error:
            problem = str(error) if isinstance(error, RankwiseError) else f"the store of the ranks failed: {error}"
        with self._lock:
            if self._attempts.get((attempt.rank, attempt.purpose)) is not attempt or attempt.connection is not None:
                return
            if problem:
                self._fail(attempt, problem)
                return
            attempt.targets = targets
            attempt.key = connection_key(self._secret, bytes.fromhex(self._addresses[attempt.rank].secret))
            self._advance(attempt, self._connect)

    def _address(self, rank: int) -> Address | None:
        key = f"{self._key}/{rank}"
        if rank not in self._addresses and self._store.check([key]):
            self._addresses[rank] = Address.read(self._store.get(key))
        return self._addresses.get(rank)

    def _advance(self, attempt: _Attempt, step: Callable[[_Attempt, socket.socket | None], None]) -> None:
        """Take the next step of an attempt; after an error, with the next address of the rank, if it has several."""
        with self._lock:
            connection = attempt.connection
            try:
                step(attempt, connection)
            except OSError as error:
                self._disconnect(attempt)
                del attempt.targets[0]
                if attempt.targets:
                    self._advance(attempt, self._connect)
                else:
                    self._fail(attempt, _text(error))
            except BaseException:
                self._fail(attempt, "this rank was interrupted")
                raise

    def _connect(self, attempt: _Attempt, _: socket.socket | None) -> None:
        family, address = attempt.targets[0]
        attempt.answer.clear()
        connection = attempt.connection = socket.socket(family)
        connection.setblocking(False)
        code = connection.connect_ex(address)
        if code == errno.EAGAIN:  # the backlog of the local listener is full
            self._disconnect(attempt)
        elif code not in _IN_PROGRESS:
            raise OSError(code, os.strerror(code))
        else:
            attempt.due = float("inf")
            self.loop.register(connection, None, partial(self._advance, attempt, self._greet))

    def _greet(self, attempt: _Attempt, connection: socket.socket | None) -> None:
        if connection is None:
            return
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        try:
            connection.getpeername()
        except OSError:  # not yet: an earlier descriptor of this number was ready
            return
        if not admit(connection):
            raise OSError("it belongs to another user")
        attempt.hello = new_hello(self._rank, attempt.purpose)
        connection.sendall(attempt.hello)
        self.loop.register(connection, partial(self._advance, attempt, self._prove))

    def _prove(self, attempt: _Attempt, connection: socket.socket | None) -> None:
        if connection is None:
            return
        try:
            piece = connection.recv(ANSWER_BYTES - len(attempt.answer))
        except BlockingIOError:
            return
        if not piece:
            raise OSError("it closed the connection")
        attempt.answer += piece
        if len(attempt.answer) < ANSWER_BYTES:
            return
        proof = proof_for(bytes(attempt.answer), attempt.key, attempt.hello)
        if not proof:
            raise OSError(
                f"what listens there does not prove that it is this rank: it has another {SECRET}, or is another "
                "program"
            )
        connection.sendall(proof)
        self.loop.unregister(connection)
        attempt.connection = None
        del self._attempts[attempt.rank, attempt.purpose]
        self._deliver(attempt.rank, attempt.purpose, connection)

    def _disconnect(self, attempt: _Attempt) -> None:
        connection, attempt.connection = attempt.connection, None
        if connection is not None:
            with suppress(KeyError):  # it is not registered yet
                self.loop.unregister(connection)
            connection.close()

    def _fail(self, attempt: _Attempt, why: str) -> None:
        self._disconnect(attempt)
        self._attempts.pop((attempt.rank, attempt.purpose), None)
        where = f" at {attempt.where}" if attempt.where else ""
        self._note_failure((attempt.rank, attempt.purpose), f"cannot be reached{where}: {why}")

    def _note_failure(self, place: tuple[int, int], reason: str) -> None:
        self._failures[place] = reason
        self._on_failure()
        self.loop.interrupt()

    def _serve(self, accept: Callable[[], object]) -> None:
        """Accept connections, and handle what they have sent to this rank."""
        with self._lock:
            if self._acceptor is None:
                return
            accept()
            try:
                clients = self._acceptor.take()
            except JoinError as error:
                self._refuse_all(str(error))
                return
            for client in clients:
                sender = self._proofs.sender(client)
                if sender is None:
                    continue
                if sender.rank <= self._rank:
                    self._acceptor.reject(client)
                else:
                    self._deliver(sender.rank, sender.purpose, self._acceptor.release(client))

    def _refuse_all(self, why: str) -> None:
        """Accept no more connections: the event loop would find those that wait again and again."""
        self.shortage = why
        while self._listeners:
            listener = self._listeners.pop()
            self.loop.unregister(listener)
            listener.close()
        self._on_failure()
        self.loop.interrupt()

    def _deliver(self, rank: int, purpose: int, connection: socket.socket) -> None:
        place = rank, purpose
        if place in self.expected:
            self.expected.remove(place)
            self.made[place] = connection
        elif not self._on_made(rank, purpose, connection):
            connection.close()


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection on which nothing is left to read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _text(error: OSError) -> str:
    text = error.strerror or str(error)
    return f"{text}; {_RAISE_LIMIT}" if error.errno in _TOO_FEW else text
