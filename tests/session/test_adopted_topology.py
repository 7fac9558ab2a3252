"""The topology in a process group that other code opened, where no variable, or only those of some ranks, has it."""

from __future__ import annotations

import pytest

from tests.session.worlds import free_port, plain, run_ranks

HOSTS = "aba"
OF_A_LAUNCHER = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1", "NUM_NODES": "2"}


def run(how: str, *, keeps: str = "") -> list[str]:
    """Return what the ranks print; rank 1 alone is on its host, and `keeps` is a rank that has variables."""
    port = free_port()
    environs = [plain(rank, 3, port, NAME=HOSTS[rank], KEEPS=keeps, **OF_A_LAUNCHER) for rank in range(3)]
    ended = run_ranks("adopted_topology.py", environs, how)
    assert [process.returncode for process in ended] == [0, 0, 0], [process.stderr for process in ended]
    return [process.stdout for process in ended]


@pytest.mark.parametrize("keeps", ["", "1"])
def test_ranks_that_have_called_init_know_it(keeps: str) -> None:
    assert run("init", keeps=keeps) == [
        "0 2 0 2\n0 (0, 2) (0, 1)\n",
        "0 1 1 2\n0 (1,) (0, 1)\n",
        "1 2 0 2\n1 (0, 2) (2,)\n",
    ]


def test_getters_alone_do_not_wait_and_advise_what_helps() -> None:
    for printed in run("getters"):
        assert printed.startswith("NotJoinedError: local_rank and local_world_size and node_rank and num_nodes cannot")
        assert printed.endswith("from the process group; call rankwise.init(), which asks the other ranks\n")


def test_a_rank_that_never_calls_init_is_named() -> None:
    first, second, third = run("late")
    assert "NotJoinedError" in second
    for printed in (first, third):
        assert "rank 1 did not call rankwise.init() within 3 s" in printed


def test_a_forked_process_does_not_use_the_connection_of_its_rank() -> None:
    first, second, _ = run("child")
    assert first == "parent 0 2 0 2\nchild 0 2 0 2\n", "known before the fork"
    assert second.startswith("parent \nchild NotJoinedError: local_rank")
