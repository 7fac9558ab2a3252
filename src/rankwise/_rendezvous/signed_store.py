"""A store whose values are signed with the secret of the job.

Every process that reaches a `TCPStore` can write to it. So each value has a code in front, of the key and the value: a
value that was written without the secret, or for another key, is an error. Counters cannot be signed, and decide
nothing but names of keys.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import PrefixStore, Store

from rankwise._net.job_secret import CODE_BYTES, SECRET, JobSecret
from rankwise.errors import JoinError, printable

_PURPOSE: Final = "store"
# How much of a key an error message shows.
_SHOWN: Final = 80


class SignedStore(Store):
    """Another store, with signed values. Torch's own code can use it as well, in C++ too.

    Attributes:
        unsigned: The store below, for code that cannot use a store that is written in Python.
    """

    def __init__(self, store: Store, secret: JobSecret, *, prefix: str = "") -> None:
        """Sign the values of a store.

        Args:
            store: The store.
            secret: The secret.
            prefix: What stands before each key in the store below, which is signed too.
        """
        super().__init__()
        self.unsigned = store
        self._secret = secret
        self._prefix = prefix

    def with_prefix(self, prefix: str) -> SignedStore:
        """Return the part of the store whose keys have a prefix."""
        # Not a `PrefixStore` of this one: it cannot delete keys of a store that is written in Python (torch 2.13).
        return SignedStore(PrefixStore(prefix, self.unsigned), self._secret, prefix=f"{self._prefix}{prefix}/")

    def set(self, key: str, value: Any) -> None:  # noqa: ANN401 - str or bytes
        self.unsigned.set(key, self._signed(key, value))  # type: ignore[arg-type]  # bytes are taken as well

    def get(self, key: str) -> bytes:
        return self._checked(key, self.unsigned.get(key))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:  # noqa: ANN401 - str or bytes
        # The code of a value is always the same, so that the signed values can be compared.
        before: Any = self._signed(key, expected) if expected else b""
        found = self.unsigned.compare_set(key, before, self._signed(key, desired))  # type: ignore[arg-type]  # likewise
        return self._checked(key, found) if found else b""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._checked(key, value) for key, value in zip(keys, self.unsigned.multi_get(keys), strict=True)]

    def multi_set(self, keys: list[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self.unsigned.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.unsigned.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.unsigned.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return self.unsigned.delete_key(key)

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self.unsigned.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self.unsigned.timeout  # type: ignore[attr-defined]  # documented, but not in torch's stubs
        return found

    def _signed(self, key: str, value: str | bytes) -> bytes:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        return self._code(key, raw) + raw

    def _code(self, key: str, value: bytes) -> bytes:
        return self._secret.code(_PURPOSE, f"{self._prefix}{key}".encode(), value)

    def _checked(self, key: str, found: bytes) -> bytes:
        """Return the value in a signed one.

        Raises:
            JoinError: It was not signed with the secret of this job, or for another key.
        """
        shown, value = found[:CODE_BYTES], found[CODE_BYTES:]
        if not hmac.compare_digest(shown, self._code(key, value)):
            raise JoinError(
                f"the entry {printable(key[-_SHOWN:])!r} of the store where the ranks meet is not signed with the "
                f"secret of this job (from {self._secret.source}): a host of this job has another secret or none, or "
                f"another program writes into the store; give all hosts the same {SECRET}"
            )
        return value


def signed(store: Store, secret: JobSecret | None) -> Store:
    """Return the store with signed values, if there is a secret."""
    return store if secret is None else SignedStore(store, secret)


def part_of(store: Store, prefix: str) -> Store:
    """Return the part of a store whose keys have a prefix."""
    found: Store = store.with_prefix(prefix) if hasattr(store, "with_prefix") else PrefixStore(prefix, store)
    return found
