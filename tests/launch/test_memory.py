"""The kernel's counters for a rank that was killed because memory ran out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise._launch.oom import count_oom_kills, oom_explanation
from tests.memory_group import memory_group
from tests.session.worlds import clean_environ

LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch"]
LIMIT = 1 << 30


@pytest.fixture
def small_group() -> Iterator[Path]:
    with memory_group(LIMIT) as group:
        yield group


@pytest.mark.slow
def test_a_rank_killed_by_the_kernel_is_reported_as_out_of_memory(small_group: Path, tmp_path: Path) -> None:
    script = tmp_path / "grow.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    data = b'x' * (4 << 30)\n")
    ended = subprocess.run(
        ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(small_group), *LAUNCH, "-n", "2", str(script)],
        env=clean_environ(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.returncode == 137, ended.stderr
    assert "rank 1 of 2" in ended.stderr
    assert "was killed by SIGKILL (out of memory: the kernel has killed for want of memory of" in ended.stderr


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [("0::/job\n", "job/memory.events", "low 0\noom 3\noom_kill {}\n"),
     ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control", "under_oom 0\noom_kill {}\n")],
    ids=["version 2", "version 1"],
)  # fmt: skip
def test_a_groups_count_is_read(groups: str, file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
    looks = []
    for count in (1, 2):
        (tmp_path / file).write_text(text.format(count))
        looks.append(count_oom_kills(tmp_path / "vmstat", tmp_path / "cgroup", tmp_path))
    assert looks == [{"this job's control group": count, "this host": 7} for count in (1, 2)]
    assert oom_explanation(*looks).endswith("of this job's control group")
    assert oom_explanation(looks[1], looks[1]) == ""


def test_counters_that_cannot_be_read_give_no_explanation(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert count_oom_kills(nothing, nothing, nothing) == {}
    assert oom_explanation({}, {"this host": 5}) == "", "it cannot be known when that was"
