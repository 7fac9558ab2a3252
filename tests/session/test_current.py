"""What a process knows of having joined."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

import rankwise as rw
from rankwise._comm.group import Group
from rankwise._session.current import current_session, is_joined


@pytest.mark.ranks("serial", 2)
def test_a_process_knows_whether_it_has_joined(comm: Group) -> None:
    assert is_joined() == dist.is_initialized() == (current_session().group is not None)


def test_a_group_of_somebody_elses_counts() -> None:
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert is_joined()
    dist.destroy_process_group()
    assert not is_joined()
    sys.excepthook = hook


@pytest.mark.ranks(2)
def test_the_reading_says_where_the_ranks_met(comm: Group) -> None:
    reading = current_session().reading
    assert str(reading.host) == "127.0.0.1 (from MASTER_ADDR)"
    assert reading.port is not None
    assert reading.port.source == "MASTER_PORT"


def test_a_world_of_one_whose_variables_say_no_more() -> None:
    with rw.init(environ={"RANK": "0", "WORLD_SIZE": "1"}) as session:
        assert session.topology.num_nodes == session.topology.local_world_size == 1
        assert "a world of one" in rw.explain()
