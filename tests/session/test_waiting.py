"""What a launcher tells while it waits for other hosts."""

from __future__ import annotations

import pytest

import rankwise as rw
from rankwise._rendezvous import waiting
from rankwise._rendezvous.elastic import multi_node_rendezvous
from rankwise._rendezvous.nodes import Nodes
from rankwise._rendezvous.waiting import WaitingReport
from tests.session.worlds import free_port

THREE = Nodes(num_nodes=3, address="left:29500")
ELASTIC = Nodes(num_nodes=4, min_nodes=2, address="left:29500", backend="c10d")
COMMAND = ("rankwise", "launch", "--nnodes", "3", "--node_rank", "0", "--master-addr", "left", "my train.py")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(waiting, "_SILENT_SECONDS", 0.0)
    return []


def test_the_missing_hosts_are_named_with_the_command_for_them_and_once(told: list[str]) -> None:
    report = WaitingReport(told.append, THREE, COMMAND, needs_secret=True)
    for _ in range(3):
        report.show_numbered({0: "left"})
    report.show_numbered({0: "left", 2: "far"})
    report.show_numbered({0: "left", 1: "right", 2: "far"})
    rest = "with the same RANKWISE_SECRET: rankwise launch --nnodes 3 --node-rank=1 --master-addr left 'my train.py'"
    first, second = told
    assert first.startswith("rankwise: 1 of 3 hosts has joined: 0 (left); missing: hosts 1-2. ")
    assert first.endswith(f" Run on host 1, and likewise on the others, {rest}")
    assert second == f"rankwise: 2 of 3 hosts have joined: 0 (left), 2 (far); missing: host 1. Run on host 1, {rest}"


def test_a_host_that_is_started_before_the_first_says_what_is_missing(told: list[str]) -> None:
    report = WaitingReport(told.append, THREE, ("rankwise", "launch", "--node-rank=1", "a.py"), needs_secret=False)
    for _ in range(2):
        report.show_first("left:29500")
    assert told == [
        "rankwise: host 0 was not found at left:29500 yet. Run on host 0: rankwise launch --node-rank=0 a.py"
    ]


def test_a_host_that_is_started_before_that_of_the_endpoint_says_so(told: list[str]) -> None:
    nodes = Nodes(
        num_nodes=2, address=f"127.0.0.1:{free_port()}", backend="c10d", options={"is_host": "0", "read_timeout": "1"}
    )
    report = WaitingReport(told.append, nodes, ("rankwise", "launch", "a.py"), needs_secret=False)
    with pytest.raises(rw.LaunchError, match="did not reach the rendezvous at"):
        multi_node_rendezvous(nodes, None, report)
    assert told == [f"rankwise: no launcher was found at {nodes.address} yet. Run on that host: rankwise launch a.py"]


def test_hosts_that_do_not_meet_in_time_are_an_error_in_words(told: list[str]) -> None:
    nodes = Nodes(
        num_nodes=2, address=f"127.0.0.1:{free_port()}", backend="c10d", run_id="7", options={"join_timeout": "1"}
    )
    handler = multi_node_rendezvous(nodes, None, WaitingReport(told.append, nodes, COMMAND, needs_secret=False))
    with pytest.raises(rw.LaunchError, match=f"the 2 hosts of run '7' .* at {nodes.address} did not meet in time"):
        handler.next_rendezvous()


def test_a_command_without_a_number_gets_one_before_its_other_options(told: list[str]) -> None:
    for command in (("rankwise", "launch", "a.py"), ("python", "-m", "rankwise.compat.torch_launch", "a.py"), ()):
        WaitingReport(told.append, THREE, command, needs_secret=False).show_numbered({0: "left", 1: "right"})
    assert [text.partition(". ")[2] for text in told] == [
        "Run on host 2: rankwise launch --node-rank=2 a.py",
        "Run on host 2: python -m rankwise.compat.torch_launch --node-rank=2 a.py",
        "Make the same call on host 2, with node_rank=2",
    ]


def test_hosts_without_numbers_and_spares(told: list[str]) -> None:
    report = WaitingReport(told.append, ELASTIC, ("rankwise", "launch", "a.py"), needs_secret=False)
    report.show_named(["left"], is_spare=False)
    report.show_named(["left", "right"], is_spare=True)
    assert told == [
        "rankwise: 1 of 2 to 4 hosts has joined: left. Run on another host: rankwise launch a.py",
        "rankwise: 2 of 2 to 4 hosts have joined: left, right; this one waits as a spare",
    ]


def test_nothing_is_told_in_the_first_seconds() -> None:
    told: list[str] = []
    WaitingReport(told.append, THREE, COMMAND, needs_secret=False).show_numbered({0: "left"})
    assert told == []
