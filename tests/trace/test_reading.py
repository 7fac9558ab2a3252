"""The files of ranks, and what follows from those of all ranks: clocks, the last rank, its cost."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from rankwise._trace import recording
from rankwise._trace.reading import Run, _calls_of, read_run
from rankwise._trace.recording import NUM_CALLS, RankCall, RankRecord, Recording, read_record
from rankwise._trace.report import summary, table
from rankwise.errors import InvalidArgumentError

CALL = "all_reduce at train.py:88"


def record(rank: int, calls: Mapping[tuple[int, int], RankCall], *, clock: float = 0.0, host: str = "a") -> RankRecord:
    return RankRecord(rank=rank, world_size=4, host=host, host_id=host, clock=clock, calls=dict(calls))


def run_of(records: list[RankRecord]) -> Run:
    return Run(folder=Path("run"), records=records, problems=[], calls=_calls_of(records))


def steps(late: Mapping[int, float], num_steps: int, clocks: tuple[float, float]) -> list[RankRecord]:
    """Return the records of four ranks, on two hosts, that come a second after the last step, and so much late."""
    calls: dict[int, dict[tuple[int, int], RankCall]] = {rank: {} for rank in range(4)}
    message, end = random.Random(0), 1000.0  # noqa: S311
    for step in range(1, num_steps + 1):
        came = {rank: end + 1.0 + late.get(rank, 0.0) for rank in range(4)}
        end = max(came.values())
        for rank in range(4):
            # The clocks of the hosts differ, and one goes faster by 50 millionths.
            clock = clocks[rank // 2] + 5e-5 * (rank // 2) * end
            calls[rank][0, step] = RankCall(CALL, came[rank] + clock, end + message.uniform(1e-4, 1e-3) + clock)
    return [record(rank, calls[rank], host="ab"[rank // 2]) for rank in range(4)]


@pytest.mark.parametrize("clocks", [(0.0, 0.0), (0.0, 5e6), (4711.5, -17.25)])
def test_the_late_rank_and_its_cost_are_found_whatever_the_clocks(clocks: tuple[float, float]) -> None:
    run = run_of(steps({3: 0.25, 1: 0.05}, 300, clocks))
    (wait, *_) = run.waits
    assert {each.rank for each in run.waits} == {3}
    assert wait.seconds == pytest.approx(0.2, abs=2e-3)
    assert run.seconds == pytest.approx(298 * 1.25, rel=0.01)
    rows = table(run)
    assert [row[:4] for row in rows[1:]] == [(CALL, "299", "rank 3", "100 %")]
    assert rows[1][-1] == f"{1 - 0.2 / 1.25:.2f}"
    assert f"without the lateness of rank 3: {1 - 0.2 / 1.25:.2f} of the time" in summary(run)


def test_hosts_without_a_common_call_have_their_own_time_of_day() -> None:
    one, two = (
        record(0, {(5, 1): RankCall(CALL, 10.0, 11.0)}, clock=100.0),
        record(2, {(6, 1): RankCall(CALL, 60.0, 61.0)}, clock=50.0, host="b"),
    )
    assert [list(call.came.values()) for call in run_of([one, two]).calls.values()] == [[10.0], [10.0]]


def test_the_rank_that_did_not_come_is_named() -> None:
    records = steps({}, 5, (0.0, 0.0))
    for each in records[:3]:
        each.calls[0, 6] = RankCall("barrier at train.py:90", 5000.0, 0.0)
    del records[1].calls[0, 6]
    assert "at the end: ranks 0, 2 in barrier at train.py:90, call 6; not there: ranks 1, 3" in summary(run_of(records))


def test_a_file_has_the_last_calls_however_it_ends(tmp_path: Path) -> None:
    trace = Recording(tmp_path, rank=3, world_size=4)
    for number in range(NUM_CALLS + 10):
        place = trace.begin(0, number, CALL)
        trace.end(place)
    trace.begin(1 << 30, 7, "barrier at train.py:90\x1b[2J\n")
    (file,) = tmp_path.iterdir()
    found = read_record(file, most=NUM_CALLS)
    assert (found.rank, found.world_size) == (3, 4)
    assert next(iter(found.calls)) == (0, 11)
    assert list(found.calls)[-1] == (1 << 30, 7)
    assert found.calls[0, NUM_CALLS].text == CALL
    assert found.calls[0, NUM_CALLS].ended >= found.calls[0, NUM_CALLS].came
    assert found.calls[1 << 30, 7] == RankCall(r"barrier at train.py:90\x1b[2J ", found.calls[1 << 30, 7].came, 0.0)
    assert len(read_record(file, most=5).calls) == 5


def test_more_texts_than_there_is_room_for_are_other_calls(tmp_path: Path) -> None:
    trace = Recording(tmp_path, rank=0, world_size=2)
    for number in range(1000):
        trace.begin(0, number, f"{'broadcast' * 20} {number}")
    (file,) = tmp_path.iterdir()
    texts = [call.text for call in read_record(file, most=NUM_CALLS).calls.values()]
    assert texts[300].endswith(" 300")
    assert texts[-1] == "other calls"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has no traces; set RANKWISE_TRACE="):
        read_run(tmp_path)
    older, newer = tmp_path / "2026-01-01", tmp_path / "2026-01-02"
    for folder in (older, newer):
        for rank in (0, 2, 3):
            Recording(folder, rank=rank, world_size=4)
    (newer / "rank00002.calls").write_bytes(b"x")
    (newer / "rank00003.calls").write_bytes(bytes(recording._FILE_BYTES))
    run = read_run(tmp_path)
    assert run.folder == newer
    problems = "\n".join(run.problems)
    assert "rank00002.calls cannot be read: 1 bytes" in problems
    assert "rank00003.calls cannot be read: " in problems
    assert "there is no trace of rank 1 in" in problems
    assert table(run)[1:] == []
    assert len(read_run(older).records) == 3
