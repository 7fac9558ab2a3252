"""The key-value store of a session for users: it differs from torch's where that has traps.

- A wait in torch's C++ is not interrupted by Ctrl-C. Here every wait polls.
- Adding to a key that holds a text closes the connection of this rank to the store, or ends its server; so does a key
  or a value that is too long. Here counters have names of their own, and lengths are checked.
- The result of torch's `compare_set` is the value found. It is the desired one also if another rank has set the same
  value, and the expected one if there is none. Here every value has a unique number, and the result is a bool.
- torch's `set` returns before the value is in the store. Here another rank finds it from then on.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from torch.distributed import HashStore
from torch.distributed import Store as TorchStore

from rankwise._arguments import as_integer, as_seconds, as_text
from rankwise._comm.comm import Comm
from rankwise._comm.control.channel import within_a_moment
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise._rendezvous.signed_store import part_of
from rankwise._user_frames import strip_internal_frames
from rankwise.errors import (
    InvalidArgumentError,
    NotJoinedError,
    RankwiseError,
    StoreError,
    StoreTimeoutError,
    shown,
)

T = TypeVar("T")

# torch's server closes the connection of a rank that sends more than 8 KiB in a key, or 8 MiB in a value.
_MOST_KEY_BYTES: Final = 1 << 12
_MOST_VALUE_BYTES: Final = 1 << 22
_LARGEST: Final = (1 << 63) - 1
# The interval between two polls is a tenth of the time waited so far, but within these limits.
_POLL_SECONDS: Final = (0.001, 0.1)
# How often a rank that waits looks whether all others are dead.
_LIFE_SECONDS: Final = 0.5
# No stored value is this one: each begins with the letter of its type, and a unique number.
_NO_VALUE: Final = "?"
_NUMBER_BYTES: Final = 8


class Store:
    """The key-value store that the ranks of a session share: `rankwise.store()`.

    Its functions are Local: each rank calls them when it likes, in any thread. Values are texts and bytes, and are
    returned as what was set. Keys are texts. Both are those of users alone, and of one session. Every function raises:

    Raises:
        InvalidArgumentError: A key, a value, a number or a timeout cannot be used. A key has at most 4 KiB, a value 4
            MiB; `broadcast` and `scatter` move larger ones.
        StoreError: The store cannot be reached: the rank or the launcher that serves it has ended.
        NotJoinedError: The session is closed, or belongs to another process.
    """

    def __init__(self, comm: Comm, *, timeout: float) -> None:
        # A strong reference would keep the server of the store alive after its session.
        self._comm = weakref.ref(comm)
        self._rank = comm.ranks[comm.control.require_member()]
        self._size = comm.size
        self._pid = os.getpid()
        self._alone = HashStore()
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key. All ranks find it from then on."""
        with self._opened() as store:
            name, raw = _value_name(key), _encoded(value, "value")
            store.set(name, raw)  # type: ignore[arg-type]  # bytes are taken as well
            store.check([name])  # its reply comes after the value is there

    def get(self, key: str, *, timeout: float | None = None) -> str | bytes:
        """Wait until a key has a value, and return it.

        Args:
            key: The key.
            timeout: Seconds to wait; the session's timeout by default.

        Raises:
            StoreTimeoutError: It was not set in time.
        """
        with self._opened():
            name = _value_name(key)
            return _decoded(self._poll([name], lambda store: _read(store, name), timeout))

    def wait(self, keys: str | Iterable[str], *, timeout: float | None = None) -> None:
        """Wait until keys have values.

        Args:
            keys: One key, or several.
            timeout: Seconds to wait; the session's timeout by default.

        Raises:
            StoreTimeoutError: They were not set in time; the message has those that are missing.
        """
        with self._opened():
            names = _value_names(keys)
            if names:
                self._poll(names, lambda store: store.check(names) or None, timeout)

    def check(self, keys: str | Iterable[str]) -> bool:
        """Return whether a key, or each of several, has a value. Does not wait."""
        with self._opened() as store:
            names = _value_names(keys)
            return not names or store.check(names)

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, and return its new value: no two ranks get the same one if all add 1.

        Counters begin at 0, have 64 bits, and have names of their own: the value of a key and a counter of its name do
        not affect each other. `add(key, 0)` reads a counter.
        """
        with self._opened() as store:
            number = as_integer(amount, "amount")
            if abs(number) > _LARGEST:
                raise InvalidArgumentError(f"amount={shown(number)} does not fit into 64 bits")
            return store.add(_counter_name(key), number)

    def compare_set(self, key: str, expected: str | bytes | None, desired: str | bytes) -> bool:
        """Set the value of a key if it is the expected one, and return whether it was set by this call.

        Of several ranks that expect the same value, one gets True.

        Args:
            key: The key.
            expected: Its present value; None if it has none.
            desired: Its new value.
        """
        with self._opened() as store:
            name, new = _value_name(key), _encoded(desired, "desired")
            if expected is not None:
                _encoded(expected, "expected")
            while True:
                found = _read(store, name)
                if (None if found is None else _decoded(found)) != expected:
                    return False
                if store.compare_set(name, found or "", new) == new:  # type: ignore[arg-type]  # bytes are taken as well
                    return True

    def delete(self, key: str) -> bool:
        """Delete the value of a key, and the counter of its name; return whether there was one of them."""
        with self._opened() as store:
            names = [_value_name(key), _counter_name(key)]
            # A store in a file reports every key as deleted.
            deleted = [store.check([name]) and store.delete_key(name) for name in names]
            return any(deleted)

    @contextmanager
    def _opened(self) -> Iterator[TorchStore]:
        """Give the store of the session; its errors, and those of arguments, end at the user's call."""
        try:
            yield self._current()
        except RankwiseError as error:
            if error.__traceback__ is not None:  # the first entry, of this function, is dropped
                strip_internal_frames(error.__traceback__.tb_next, error)
            raise
        except RuntimeError as error:
            comm = self._comm()
            dead = within_a_moment(comm.control.dead_ranks) if comm else ""
            cause = dead or "the rank or the launcher that serves it has ended"
            raise StoreError(f"the store of the session cannot be reached: {cause}. torch reports: {error}") from error

    def _current(self) -> TorchStore:
        """Return the part of the session's store that is for users.

        Raises:
            NotJoinedError: The session is closed, or belongs to another process.
        """
        if self._pid != os.getpid():
            raise NotJoinedError.forked(self._rank)
        comm = self._comm()
        if comm is None or comm.closed:
            raise NotJoinedError(
                "the session of this store is closed; call rankwise.init(), and rankwise.store() for its own"
            )
        return part_of(comm.shared_store() or self._alone, "user")

    def _poll(self, names: list[str], attempt: Callable[[TorchStore], T | None], timeout: float | None) -> T:
        """Return the result of `attempt` as soon as it is not None, for which these names need values."""
        seconds = self._timeout if timeout is None else as_seconds(timeout, "timeout")
        start = last_look = time.monotonic()
        in_vain = ""
        while True:
            found = attempt(self._current())
            if found is not None:
                return found
            waited = elapsed_since(start)
            if in_vain or waited > seconds:
                raise self._missing(names, seconds, in_vain)
            if time.monotonic() - last_look > _LIFE_SECONDS:
                last_look = time.monotonic()
                in_vain = self._others_dead()  # the last of them may have set it: one more attempt
            shortest, longest = _POLL_SECONDS
            time.sleep(min(max(shortest, waited / 10), longest, max(0.0, seconds - waited)))

    def _others_dead(self) -> str:
        """Return the reasons why all other ranks are dead; "" if one of them is alive, or there are none."""
        comm = self._comm()
        found = [comm.control.dead_ranks([rank]) for rank in comm.ranks if rank != self._rank] if comm else []
        return "; ".join(found) if found and all(found) else ""

    def _missing(self, names: list[str], seconds: float, in_vain: str) -> StoreError:
        """Return the error of a wait for names without values: all other ranks are dead, or it took too long."""
        store, comm = self._current(), self._comm()
        keys = [name.partition("/")[2] for name in names if not store.check([name])]
        listed = shown(keys[0] if len(keys) == 1 else keys, 300)
        text = f"rank {self._rank} of {self._size} waits for {listed} in the store"
        if in_vain:
            return StoreError(f"{text} in vain: no rank has set it, and {in_vain}")
        dead = comm.control.dead_ranks() if comm else ""
        is_counter = len(keys) == 1 and store.check([_counter_name(keys[0])])
        hint = "; there is a counter of this name: read it with add(key, 0)" if is_counter else ""
        return StoreTimeoutError(f"{text}: no rank has set it within {seconds:g} s{f'; {dead}' if dead else ''}{hint}")


def _value_names(keys: object) -> list[str]:
    if isinstance(keys, str):
        return [_value_name(keys)]
    if isinstance(keys, bytes) or not isinstance(keys, Iterable):
        raise InvalidArgumentError(f"keys={shown(keys)} is neither a key nor a sequence of keys")
    return [_value_name(key) for key in keys]


def _value_name(key: object) -> str:
    return f"value/{_checked_key(key)}"


def _counter_name(key: object) -> str:
    return f"counter/{_checked_key(key)}"


def _checked_key(key: object) -> str:
    text = as_text(key, "key")
    try:
        length = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"key={shown(text)} is not Unicode: {error.reason}") from error
    if length > _MOST_KEY_BYTES:
        raise InvalidArgumentError(f"key={shown(text)} has {length} bytes; keys have at most {_MOST_KEY_BYTES}")
    return text


def _encoded(value: object, name: str) -> bytes:
    """Return a value as it is stored: the letter of its type, a unique number, and its contents."""
    if isinstance(value, str):
        letter, contents = b"s", value.encode(errors="surrogatepass")
    elif isinstance(value, bytes):
        letter, contents = b"b", bytes(value)
    else:
        raise InvalidArgumentError(f"{name}={shown(value)}, of type {type(value).__qualname__}, is no text or bytes")
    if len(contents) > _MOST_VALUE_BYTES:
        raise InvalidArgumentError(
            f"{name} has {len(contents)} bytes, and values at most {_MOST_VALUE_BYTES}: broadcast it, or scatter"
        )
    return letter + secrets.token_bytes(_NUMBER_BYTES) + contents


def _decoded(raw: bytes) -> str | bytes:
    contents = raw[1 + _NUMBER_BYTES :]
    return contents.decode(errors="surrogatepass") if raw[:1] == b"s" else contents


def _read(store: TorchStore, name: str) -> bytes | None:
    """Return the value of a name as it is stored; None if there is none. torch's `get` would wait for one."""
    found = store.compare_set(name, _NO_VALUE, _NO_VALUE)
    return None if found == _NO_VALUE.encode() else found
