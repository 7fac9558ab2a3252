"""Topology: checked when built, uneven nodes allowed."""

from __future__ import annotations

import pytest

from rankwise.errors import TopologyError
from rankwise.topology import Topology
from tests.tables import each_row

TOPOLOGY = {"rank": 2, "world_size": 3, "local_rank": 0, "local_world_size": 1, "node_rank": 1, "num_nodes": 2}


def test_uneven_nodes_are_fine() -> None:
    assert not Topology(**TOPOLOGY).is_rank_zero


@each_row(
    "change",
    [
        {"rank": 3},
        {"rank": -1},
        {"world_size": 0},
        {"local_rank": 1},
        {"local_world_size": 4},
        {"node_rank": 2},
        {"num_nodes": 4},
        {"num_nodes": 1, "node_rank": 0},
        {"local_world_size": 3},
    ],
)
def test_numbers_that_do_not_fit_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(TopologyError):
        Topology(**(TOPOLOGY | change))
