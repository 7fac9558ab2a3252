"""A store that counts what a rank asks of it; and ranks that join and connect with one each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store

from rankwise._comm.control.links.links import Links
from rankwise._rendezvous.membership import JoinRequest
from rankwise._rendezvous.store import join_over_store
from tests.comm.members import connect, in_threads

PER_HOST = 8


class CountingStore:
    """A store for one rank.

    A question that is repeated, since the answer was not there yet, counts once.

    Attributes:
        asked: The operations: what, and for which keys.
        sizes: The bytes of the values that each of them has written or read.
    """

    def __init__(self, store: Store, asked: dict[tuple[str, ...], int] | None = None, prefix: str = "") -> None:
        self.asked = {} if asked is None else asked
        self._store = store
        self._prefix = prefix

    def with_prefix(self, prefix: str) -> CountingStore:
        return CountingStore(PrefixStore(prefix, self._store), self.asked, f"{self._prefix}{prefix}/")

    def _count(self, what: str, keys: Sequence[str], num_bytes: int = 0) -> None:
        self.asked[what, *(f"{self._prefix}{key}" for key in keys)] = num_bytes

    def set(self, key: str, value: str | bytes) -> None:
        self._count("set", [key], len(value))
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are taken as well

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count("get", [key], len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._count("get", keys, sum(map(len, values)))
        return values

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys)
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        self._count("add", [key])
        return self._store.add(key, amount)


def request_of(rank: int, size: int) -> JoinRequest:
    """Return a request to join, as long as those of a cluster are."""
    return JoinRequest(
        rank=rank,
        world_size=size,
        local_rank=rank % PER_HOST,
        local_world_size=PER_HOST,
        node_rank=rank // PER_HOST,
        num_nodes=-(-size // PER_HOST),
        host=f"gpu-node-{rank // PER_HOST:05}.cluster.example.org",
        host_id=f"af2d7c6a-7f1c-4b52-b6a4-{rank // PER_HOST:012}",
        process=100_000 + rank,
        job="1234567",
        reached="10.1.0.1",
        device=f"cuda:{rank % PER_HOST}",
        device_uuid=f"GPU-9aa3b7e5-1f0c-44d1-8b7a-{rank:012}",
        backend="cpu:gloo,cuda:nccl",
    )


def host_of_thread() -> str:
    """Stand for `network_id`: eight ranks, which are threads, have one host."""
    return str(int(threading.current_thread().name) // PER_HOST)


def asked_while_joining(size: int) -> list[dict[tuple[str, ...], int]]:
    """Let ranks, in threads, join over a store and connect; return what each has asked of it. See `host_of_thread`."""
    shared = HashStore()
    opened: list[Links] = []

    def join(rank: int) -> dict[tuple[str, ...], int]:
        store: Any = CountingStore(shared)
        reply, session = join_over_store(store, request_of(rank, size), timeout=100.0)
        assert not reply.error
        opened.append(connect(rank, session, size))
        return dict(store.asked)

    results = in_threads(join, size)
    for links in opened:
        links.close()
    assert len(opened) == size, results
    return results
