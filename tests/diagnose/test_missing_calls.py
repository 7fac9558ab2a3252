"""What the flight records of ranks show, and how findings of another host are read."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rankwise._diagnose.findings import Findings
from rankwise._diagnose.flight_record import GroupCalls
from rankwise._diagnose.hang_report import absent_ranks, missing_calls
from rankwise._diagnose.sampling import ProcessSample, RankSample
from rankwise._diagnose.stack import Stack, StackFrame
from rankwise._session.call_record import CallRecord
from rankwise._torch import ranks_of_groups, recorded_backends
from tests.tables import each_row


def calls(*operations: str, pending: tuple[int, ...] = (), ranks: tuple[int, ...] = (0, 1, 2)) -> GroupCalls:
    """Return calls that begin with number 1."""
    return GroupCalls(ranks=ranks, reached=len(operations), operations=dict(enumerate(operations, 1)), pending=pending)


STEP = ("all_reduce", "all_reduce")
WAITS = calls(*STEP, "barrier", pending=(3,))
CASES: dict[str, tuple[dict[int, dict[str, GroupCalls]], list[str], set[int]]] = {
    "nobody waits": ({0: {"0": calls(*STEP)}, 1: {"0": calls("all_reduce")}, 2: {}}, [], set()),
    "all wait in the same one": ({rank: {"0": WAITS} for rank in range(3)}, [], set()),
    "one has not come": (
        {0: {"0": WAITS}, 1: {"0": calls(*STEP)}, 2: {"0": WAITS}},
        ["collective 3 of process group 0: barrier of ranks 0, 2; rank 1 has not come"],
        {1},
    ),
    "the first that one has not reached": (
        {0: {"0": calls(*STEP, "send", "barrier", pending=(4,))}, 1: {"0": calls(*STEP)}, 2: {"0": WAITS}},
        ["collective 3 of process group 0: send of rank 0, barrier of rank 2; rank 1 has not come; operations differ"],
        {1},
    ),
    "one has called nothing, and one does not answer": (
        {0: {"0": calls("barrier", pending=(1,))}, 1: {}},
        ["collective 1 of process group 0: barrier of rank 0; rank 1 has not come; rank 2 did not answer"],
        {1},
    ),
    "one waits in another group, for a third one": (
        {
            0: {"0": calls("barrier", pending=(1,), ranks=(0, 1))},
            1: {"1": calls("all_reduce", pending=(1,), ranks=(1, 2))},
            2: {},
        },
        ["collective 1 of process group 0: barrier of rank 0; rank 1 has not come",
         "collective 1 of process group 1: all_reduce of rank 1; rank 2 has not come"],
        {2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_first_collective_that_not_all_have_reached_is_found(case: str) -> None:
    recorded, texts, absent = CASES[case]
    found = missing_calls(recorded, range(3))
    assert [str(each) for each in found] == texts
    assert absent_ranks(found, recorded) == absent


def test_calls_of_nccl_are_in_a_record_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In builds for CUDA alone: here, it is the record of gloo with the name of NCCL, and one call that is pending."""
    module: Any = torch._C._distributed_c10d
    of_gloo = module._dump_fr_trace_json

    def of_nccl(*, includeCollectives: bool) -> str:  # noqa: N803 - torch's name
        record = json.loads(of_gloo(includeCollectives=includeCollectives))
        for entry in record.get("entries", []):
            entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
            entry["retired"] = not entry["profiling_name"].endswith("all_reduce")
        for status in record["pg_status"].values():
            status["last_enqueued_collective"] = int(status["last_enqueued_collective"]) + 1
        return json.dumps(record)

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch changes it with a process group
    monkeypatch.setattr(module, "_dump_nccl_trace_json", of_nccl, raising=False)
    assert recorded_backends() == {"gloo", "nccl"}
    with monkeypatch.context() as off:
        off.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
        assert recorded_backends() == set()
    record = CallRecord(adopted=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert record.calls() == {}  # called nothing yet
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        (name,) = ranks_of_groups()
        found = record.calls()
        assert set(found) == {f"{name} (gloo)", f"{name} (nccl)"}
        assert found[f"{name} (nccl)"].operations[2] == "all_reduce"
        assert found[f"{name} (nccl)"].pending[-1] == 2
        assert any(group.endswith(" (nccl)") for group in record.pending())
    finally:
        dist.destroy_process_group()


FRAME = StackFrame("wait", "/torch/distributed/distributed_c10d.py", 7)
SAMPLE = RankSample(
    rank=1,
    process=ProcessSample(pid=7, state="S", channel="futex", stack=Stack([FRAME]), waits_for_device=True),
    workers=(ProcessSample(pid=8, state="T", reason="\x1b[2Jstopped"),),
)
FINDINGS = Findings(host="node1", history=[[SAMPLE], [SAMPLE]], quiet={1: 61.5}, spent=0.3, calls={1: {"0": WAITS}})
CALLED = "collective 3 of process group 0: barrier of rank 1; ranks 0, 2 did not answer"


def test_findings_of_another_host_are_the_same_but_for_control_characters() -> None:
    received = Findings.decode(json.loads(json.dumps(FINDINGS.encode())))
    assert received.history[1][0].process.location == SAMPLE.process.location
    assert received.history[1][0].workers[0].reason == "\\x1b[2Jstopped"
    assert received.history[1][0].process.waits_for_device
    assert received.longest_wait() == FINDINGS.longest_wait() == 61.5
    assert (received.host, received.quiet, received.spent) == (FINDINGS.host, FINDINGS.quiet, FINDINGS.spent)
    assert str(missing_calls(received.calls, range(3))[0]) == CALLED


@each_row(
    "change",
    [
        {"history": []},
        {"history": 7},
        {"history": [[{"rank": 1}]]},
        {"quiet": {"one": 1}},
        {"spent": None},
        {"calls": {"1": {"0": 3}}},
        {"host": ["node1"]},
    ],
)
def test_malformed_findings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"these are no (findings|calls)|invalid literal"):
        Findings.decode(FINDINGS.encode() | change)
    with pytest.raises(ValueError, match="these are no findings"):
        Findings.decode(None)
