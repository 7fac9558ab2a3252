"""The key-value store of a session when a rank dies, when the session ends, and in groups that are adopted.

The session's timeout is 280 s, and the ranks are given 200: so nobody has waited for a timeout.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import rankwise as rw
from rankwise.testing.fakes import recording
from tests.lanes import variants
from tests.session.test_forks import said_in_a_forked_child
from tests.session.worlds import free_port, plain, run_ranks


def ended(how: str, size: int, who: int, *args: str) -> list[subprocess.CompletedProcess[str]]:
    port = free_port()
    environs = [plain(rank, size, port) for rank in range(size)]
    processes = run_ranks("key_values.py", environs, how, str(who), *args)
    for rank, process in enumerate(processes):
        assert process.returncode == (-9 if rank == who else 0), process.stderr
    return processes


def test_a_key_that_no_rank_is_left_to_set() -> None:
    """The only other rank is dead; the value that it had set before is there."""
    process = ended("in vain", 2, 1)[0]
    assert process.stdout.startswith(
        "StoreError rank 0 of 2 waits for 'missing' in the store in vain: no rank has set it, and rank 1 is gone"
    ), process.stdout


@pytest.mark.slow
def test_dead_ranks_are_named_when_a_key_is_not_set_in_time() -> None:
    for rank, process in enumerate(ended("late", 3, 2)[:2]):
        wanted = f"StoreTimeoutError rank {rank} of 3 waits for 'missing' in the store: no rank has set it within 3 s; "
        # The other rank may have raised, and left, just before.
        assert process.stdout.startswith(wanted), process.stdout
        assert "rank 2 is gone" in process.stdout, process.stdout


@pytest.mark.slow
def test_the_rank_that_serves_the_store_is_killed() -> None:
    for process in ended("served by it", 3, 0)[1:]:
        wanted = "StoreError the store of the session cannot be reached: "
        assert process.stdout.startswith(wanted), process.stdout
        assert "rank 0 is gone" in process.stdout or "has ended" in process.stdout


def test_a_store_ends_with_its_session() -> None:
    for process in ended("ends", 2, -1):
        first, second = process.stdout.splitlines()
        assert first.startswith("NotJoinedError the session of this store is closed; call rankwise.init()"), first
        assert second == "False False"


def test_a_world_that_nobody_joined_has_no_store() -> None:
    for rank, process in enumerate(ended("not joined", 2, -1)):
        assert process.stdout.startswith(
            f"this is rank {rank} (from RANK) of 2 (from WORLD_SIZE), but it has not joined"
        )


@pytest.mark.parametrize("place", ["env://", "file"])
@pytest.mark.parametrize("size", variants([1, 3], fast=[3], slow=[]))
def test_ranks_of_an_adopted_group_share_a_store(size: int, place: str, tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'meet'}" if place == "file" else place
    for process in ended("adopted", size, -1, "gloo", method):
        first, second = process.stdout.splitlines()
        assert first == f"{[bytes([rank]) for rank in range(size)]} {size} same False"
        assert "closed" in second or "destroyed" in second


def test_alone() -> None:
    store = rw.store()
    store.set("a", "b")
    assert rw.store() is store
    assert rw.store().get("a") == "b"
    assert "forked from rank 0" in said_in_a_forked_child(lambda: store.check("a"))
    with rw.init():
        joined = rw.store()
        assert joined is rw.store()
        assert joined is not store
        assert not joined.check("a")
        joined.set("a", "b")
        assert "forked from rank 0" in said_in_a_forked_child(rw.store)
    with pytest.raises(rw.NotJoinedError, match="the session of this store is closed"):
        joined.get("a")


def test_a_recording_session_has_a_store() -> None:
    with recording(rank=1, world_size=3) as comm:
        assert rw.store().add("x") == 1
        rw.store().set("y", "z")
        assert rw.store().get("y") == "z"
        with pytest.raises(rw.StoreTimeoutError, match="rank 1 of 3 waits for 'q'"):
            rw.store().get("q", timeout=0.01)
    assert comm.calls == []
