"""The hosts of the ranks of a process group that other code opened: they give the topology that no variable has.

Each rank writes its host to the store of the group in `init()`, which does not wait. Whoever needs the topology first
reads those of all ranks, and waits for the ranks that have not called `init()`.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch.distributed as dist

from rankwise._environment.facts import Fact, LaunchEnvironment
from rankwise._net.host import host_id
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise._text import ranks_text
from rankwise.errors import JoinTimeoutError, StoreError

_SOURCE: Final = "the other ranks"
_PAUSE_SECONDS: Final = 0.01


class AdoptedHosts:
    """The hosts of the ranks of a group."""

    def __init__(self, store: Callable[[], dist.Store], *, rank: int, world_size: int) -> None:
        """Write and read nothing yet.

        Args:
            store: Returns the store of the group. It is not the part of one session: every `init()` of a rank writes
                the same, and ranks may call it any number of times.
            rank, world_size: Those of this process in the group.
        """
        self._store = store
        self._rank = rank
        self._keys = [f"rankwise/host/{number}" for number in range(world_size)]
        self.is_published = False

    def publish(self) -> None:
        """Let the others know the host of this rank, if the store can be written to: few programs need it."""
        with suppress(RuntimeError):  # torch's stores raise no other
            self._store().set(self._keys[self._rank], f"{host_id()} {socket.gethostname()}")
        self.is_published = True

    def complete(
        self, reading: LaunchEnvironment, timeout: float, *, local_rank: int | None = None
    ) -> LaunchEnvironment:
        """Return the environment of this rank with the numbers that it lacks.

        Args:
            reading: The environment.
            timeout: Seconds to wait for the other ranks.
            local_rank: This process's rank on its node, if the user has said so.

        Raises:
            JoinTimeoutError: Some ranks have not called `init()` in time.
            StoreError: The store cannot be used, or has ended.
        """
        hosts = self._read(timeout)
        own = hosts[self._rank]
        counted = {
            "local_rank": hosts[: self._rank].count(own) if local_rank is None else local_rank,
            "local_world_size": Counter(hosts)[own],
            "node_rank": list(dict.fromkeys(hosts)).index(own),
            "num_nodes": len(set(hosts)),
        }
        known = reading.known_topology()
        return reading.with_topology(
            **{name: Fact(value, _SOURCE) for name, value in counted.items() if name not in known}
        )

    def _read(self, timeout: float) -> list[bytes]:
        store, start = self._store(), time.monotonic()
        try:
            while not store.check(self._keys):
                if elapsed_since(start) > timeout:
                    missing = [rank for rank, key in enumerate(self._keys) if not store.check([key])]
                    raise JoinTimeoutError(
                        f"the topology of {len(self._keys)} ranks is not known: {ranks_text(missing)} did not call "
                        f"rankwise.init() within {timeout:g} s, in a process group that other code opened"
                    )
                time.sleep(_PAUSE_SECONDS)
            return [bytes(host) for host in store.multi_get(self._keys)]
        except RuntimeError as error:
            if isinstance(error, JoinTimeoutError):
                raise
            raise StoreError(
                f"the store of the process group that other code opened cannot be used: {error}"
            ) from error
