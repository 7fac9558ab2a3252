"""Members of a group as threads of this process, each with a mesh of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rankwise._comm.control.mesh import Mesh
from torch.distributed import Store

from rankwise._comm.control.connect import connect_mesh
from rankwise._comm.control.protocol import Frame, FrameKind

SIZE = 3
CALL = Frame(FrameKind.CALL, 0, "all_reduce at train.py:88")
NO_BODIES = [b""] * SIZE


def in_threads(fn: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    """Call a function for each group rank at the same time; return its results, or the exceptions that it raised."""
    results: list[Any] = [None] * size

    def run(group_rank: int) -> None:
        try:
            results[group_rank] = fn(group_rank)
        except Exception as error:  # noqa: BLE001 - it is the result
            results[group_rank] = error

    threads = [threading.Thread(target=run, args=(group_rank,), daemon=True) for group_rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    return results


def connect(group_rank: int, store: Store, size: int = SIZE, **replaced: Any) -> Mesh:
    """Connect a member of a group of ranks 10, 11, ...; `replaced` are arguments of `connect_mesh`."""
    arguments: dict[str, Any] = {
        "one_host": False,
        "own_address": lambda: "127.0.0.1",
        "timeout": 100.0,
        "check_alive": lambda _: None,
    }
    arguments |= replaced
    return connect_mesh(store=store, name="group", ranks=range(10, 10 + size), group_rank=group_rank, **arguments)


def exchange(mesh: Mesh, bodies: list[bytes], timeout: float = 100.0) -> dict[int, Frame]:
    """Exchange frames without looking for deadlocks."""
    return mesh.exchange_frames(CALL, bodies, timeout=timeout, on_pause=lambda _: None)


def assert_connected(meshes: list[Mesh]) -> None:
    """Check that every member receives a frame from every member."""
    counts = in_threads(lambda group_rank: len(exchange(meshes[group_rank], NO_BODIES)))
    assert counts == [SIZE] * SIZE
