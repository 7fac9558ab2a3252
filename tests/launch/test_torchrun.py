"""torchrun's contract: a rank's environment is complete, and options have the same meaning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise._environment.nesting import AGENT_VARIABLES
from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port

BIN = Path(sys.executable).parent
RANKWISE = [str(BIN / "rankwise"), "launch"]
TORCHRUN = [str(BIN / "torchrun")]

# The addresses are each launcher's own; torchrun leaves the number of threads at 1, whatever the host has.
THEIR_OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"}
OURS = {"GLOO_SOCKET_IFNAME", "RANKWISE_LAUNCH", "RANKWISE_RUN_ID", "RANKWISE_OUTER_RANK"}
# Where torchrun wants errors to be written, for its own report.
NOT_OURS = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}

SHOW = "import json, os\nos.write(1, (json.dumps(dict(os.environ)) + '\\n').encode())\n"
TALK = (
    "import os, torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "one = torch.ones(1)\n"
    "dist.all_reduce(one)\n"
    "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'GROUP_RANK')\n"
    "os.write(1, (' '.join([*map(os.environ.get, names), str(int(one))]) + '\\n').encode())\n"
    "dist.destroy_process_group()\n"
)


def environments(folder: Path, *command: str) -> list[dict[str, str]]:
    environ = clean_environ(TMPDIR=str(folder))  # torchrun leaves something there
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=True)
    return sorted(map(json.loads, ended.stdout.splitlines()), key=lambda environ: int(environ["RANK"]))


@pytest.mark.slow
def test_a_rank_has_the_variables_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    ours = environments(tmp_path, *RANKWISE, "--standalone", "--nproc-per-node=2", "--no-prefix", str(script))
    theirs = environments(tmp_path, *TORCHRUN, "--standalone", "--nproc-per-node=2", str(script))
    for our, their in zip(ours, theirs, strict=True):
        assert set(their) - set(our) <= NOT_OURS
        assert set(our) - set(their) <= OURS
        assert set(our) & set(their) - set(os.environ) >= AGENT_VARIABLES, "which are not those of an inner launcher"
        shared = set(our) & set(their) - THEIR_OWN
        assert {name: our[name] for name in shared} == {name: their[name] for name in shared}


@pytest.mark.rare
def test_a_launch_with_the_run_id_of_another_one_ends_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("print('up', flush=True)\ninput()\n")
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "run"]
    command = [*RANKWISE, "-n", "1", "--nnodes", "1", *meeting, str(script)]

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=clean_environ(), stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    with start() as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        with start() as second:
            assert second.stderr is not None
            assert "waits as a spare" in second.stderr.readline()
            first.communicate("\n", timeout=200)
            _, errors = second.communicate(timeout=200)
    assert first.returncode == 0
    if second.returncode == 0:  # it has read, before the store was gone, that the run is over
        assert not errors
        return
    assert second.returncode == 1
    assert errors.startswith("rankwise: the store of run 'run' (--rdzv-id) at localhost:")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("backend", variants(["static", "c10d"], slow=["static"]))
def test_two_hosts_meet_as_under_torchrun(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text(TALK)
    port = str(free_port())
    meeting = {
        "static": ["--master-addr", "127.0.0.1", "--master-port", port],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv-id", "run"],
    }[backend]
    nodes = [
        subprocess.Popen(
            [*RANKWISE, "-n", "2", "--nnodes", "2", "--node_rank", str(node), *meeting, "--no-prefix", str(script)],
            env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    ends = [node.communicate(timeout=200) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ends
    lines = sorted(line.split() for out, _ in ends for line in out.splitlines())
    assert lines == [[str(rank), "4", str(rank % 2), str(rank // 2), "4"] for rank in range(4)]


@pytest.mark.parametrize(("needed", "status"), variants([("2", 0), ("3", 1)], slow=[("3", 1)]))
def test_ranks_are_started_again_as_often_as_allowed(needed: str, status: int, tmp_path: Path) -> None:
    script = tmp_path / "try.py"
    script.write_text(
        "import os, sys\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "os.write(1, f'{os.environ[\"RANK\"]} {attempt}\\n'.encode())\n"
        "sys.exit(attempt < sys.argv[1])\n"
    )
    ended = subprocess.run(
        [*RANKWISE, "-n", "1", "--max-restarts", "2", str(script), needed],
        env=clean_environ(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (status, "0 0\n0 1\n0 2\n"), ended.stderr
    assert [f"attempt {attempt} of 3 failed: rank 0 of 1" in ended.stderr for attempt in (1, 2)] == [True, True]


FAULTS = [
    ("raise ValueError('the loss is not a number')", 1, "raised ValueError"),
    ("sys.exit()", 1, "raised RuntimeError"),
    ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
    ("sys.excepthook = lambda *error: print('hooked', error[1]); 1 / 0", 1, "raised ZeroDivisionError"),
]


@pytest.mark.parametrize(("fault", "status", "wanted"), variants(FAULTS, slow=FAULTS[:2]))
def test_the_cause_is_shown_once_though_gloo_logs_it_first(
    fault: str, status: int, wanted: str, tmp_path: Path
) -> None:
    script = tmp_path / "fault.py"
    script.write_text(
        "import os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        f"if dist.get_rank() == 1:\n    {fault}\n"
        "dist.barrier()\n"
    )
    ended = subprocess.run(
        [*RANKWISE, "-n", "3", str(script)],
        env=clean_environ(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.returncode == status
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("rankwise: rank ")
    assert wanted in lines[0]
    if fault == "sys.exit()":
        assert lines[-1] == "rank 1 had ended before that, with exit code 0"
    else:
        assert " 1 of 3 on " in lines[0]
    assert ended.stderr.count("Traceback (most recent call last)") == (status == 1)
    assert ended.stdout == ("[1] hooked division by zero\n" if "hooked" in fault else "")
