"""Traces of sessions, and the command that shows them."""

from __future__ import annotations

import html.parser
import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise._session.call_trace import CallTrace
from rankwise._session.session import state_behind
from rankwise._trace.reading import Run, read_run

PROGRAM = Path(__file__).parent / "programs" / "late.py"


def of_rank_zero(folder: Path) -> Path:
    return Path(rw.broadcast(str(folder)))


def traced(folder: Path, session: rw.Session) -> CallTrace:
    trace = CallTrace(folder, None)
    trace.start(state_behind(session))
    return trace


def texts(run: Run) -> list[str]:
    return [call.text.replace("_", "").partition(" at ")[0] for call in run.calls.values()]


@pytest.mark.ranks(2)
def test_calls_of_all_groups_are_recorded_until_the_end(session: rw.Session, tmp_path: Path) -> None:
    folder = of_rank_zero(tmp_path)
    before = rw.new_group([1, 0])
    trace = traced(folder, session)
    rw.barrier(group=before)
    rw.barrier(group=rw.new_group([1, 0]))
    trace.stop()
    rw.barrier()
    run = read_run(folder)
    assert run.problems == []
    assert texts(run).count("barrier") == 2
    assert len(run.members) >= 2
    assert all(set(call.came) == set(call.ended) == {0, 1} for call in run.calls.values())
    rw.barrier()


@pytest.mark.ranks(2)
def test_collectives_of_torch_are_recorded(session: rw.Session, tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(2))  # before the trace
    folder = of_rank_zero(tmp_path)
    trace = traced(folder, session)
    group = dist.new_group([0, 1])
    rw.barrier()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(2), 0, group=group)
    trace.stop()
    rw.barrier()
    run = read_run(folder)
    found = [text.partition(" in group")[0] for text in texts(run) if text.startswith("torch ")]
    assert found == ["torch allreduce", "torch broadcast"] * 3
    assert len([call for call in run.complete if call.text.startswith("torch ")]) == 6
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fault", ["a file", "full"])
def test_a_folder_that_cannot_be_written_is_a_warning(
    session: rw.Session, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = of_rank_zero(tmp_path)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "a file":
        (folder / "file").touch()
        folder /= "file"
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, usual[1]))
    with caplog.at_level(logging.WARNING):
        trace = traced(folder, session)
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    (text,) = [entry.getMessage() for entry in caplog.records]
    assert text.startswith(f"rank {session.rank} is not traced: ")
    assert text.endswith("; see RANKWISE_TRACE")
    assert rw.all_reduce(1) == 2
    trace.stop()
    assert not list(folder.glob("*/*"))


def test_a_folder_has_to_be_a_path() -> None:
    with pytest.raises(rw.InvalidArgumentError, match="trace=3 is not a path"):
        rw.init(trace=3)  # type: ignore[arg-type]
    with rw.init(trace="nowhere") as session:  # a rank alone has nothing to trace
        assert session.world_size == 1
    assert not Path("nowhere").exists()


class Tags(html.parser.HTMLParser):
    """Collects the tags of a page, which all end in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.sources += [value or "" for name, value in attrs if name in {"href", "src"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def command(*arguments: object, status: int = 0) -> str:
    line = [sys.executable, "-m", "rankwise", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_trace_of_a_job_whose_late_rank_was_killed(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "rankwise", "launch", "-n", "3", str(PROGRAM), "1", "0.03", "20", "kill"]
    environ = {**os.environ, "RANKWISE_TRACE": str(tmp_path)}
    subprocess.run(launch, env=environ, check=False, timeout=200, capture_output=True)
    text = command("trace", tmp_path)
    assert "not there: rank 1" in text
    assert "in barrier at late.py:" in text
    head, row, *_ = [line for line in text.splitlines() if line.startswith(("call site", "all_reduce"))]
    assert row.split()[2:6] == ["late.py:21", "19", "rank", "1"], (head, row)
    (run,) = tmp_path.iterdir()
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert len([event for event in events if event["ph"] == "X"]) == 60
    assert len([event for event in events if event["ph"] == "i"]) == 2, "two ranks in the last call"
    tags = Tags()
    tags.feed((run / "lateness.html").read_text())
    assert tags.open == []
    assert {"table", "svg", "image"} <= set(tags.seen)
    assert all(source.startswith("data:") for source in tags.sources)
    (tmp_path / "file").touch()
    said = command("trace", tmp_path, "--output", tmp_path / "file" / "folder", status=1)
    assert "cannot be written" in said
    assert "Traceback" not in said
