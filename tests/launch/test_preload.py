"""Modules that are imported once for all ranks: which ranks inherit, and which each of them imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rankwise as rw
from rankwise._launch.forkserver.preloading import RANK_VARIABLES
from rankwise.launching import ScriptLaunch

RANKWISE = str(Path(sys.executable).parent / "rankwise")
# Modules of which each rank inherits a copy, or which it has to import, with the reason.
INHERITED = {
    "quiet": "import os\nos.environ['SET_BY_QUIET'] = 'yes'\nprint('printed once')",
    "copies": "import os\ndict(os.environ), os.environ.copy(), os.environ.get('HOME')",
    "finished": "import subprocess, sys\nsubprocess.Popen(['true']).wait()",
    "needs_quiet": "import quiet",
}
IMPORTED_BY_RANKS = {
    "threads": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True, name='poll').start()",
        "started the thread 'poll'",
    ),
    "child": ("import subprocess\nsubprocess.Popen(['sleep', '60'])", "started a process"),
    "connected": ("import socket\nheld = socket.socket()", "opened a socket"),
    "asks": ("import os\nif 'RANK' in os.environ: pass\nos.getenv('LOCAL_RANK')", "read LOCAL_RANK, RANK"),
    "raises": ("import os\nif 'RANK' not in os.environ: raise ValueError(1)", "raised ValueError: 1 and read RANK"),
    "folder": (
        "import atexit, shutil, tempfile\natexit.register(shutil.rmtree, tempfile.mkdtemp(prefix='of_folder_'), True)",
        "registered a function to run at exit",
    ),
    "held": (
        "import tempfile\nfolder = tempfile.TemporaryDirectory(prefix='of_held_')", "keeps what is removed at exit"
    ),
    "exits": ("import os\nif 'RANK' not in os.environ: raise SystemExit(3)", "raised SystemExit: 3 and read RANK"),
}  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of installed packages; each module has a variable with the process that has imported it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    modules = INHERITED | {name: code for name, (code, _) in IMPORTED_BY_RANKS.items()}
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(f"import os as _os\nPID = _os.getpid()\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def run(tmp_path: Path, *options: str, script: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(script)
    command = [RANKWISE, "launch", "-n", "2", *options, "script.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)


def script_of(*names: str) -> str:
    """Return a script that prints the modules that were not imported by this process."""
    imports = "".join(f"import {name}\n" for name in names)
    return f"import os, own\n{imports}print(*sorted(n for n in {names!r} if globals()[n].PID != os.getpid()), own.A)\n"


@pytest.mark.usefixtures("site")
def test_a_module_is_inherited_unless_a_fork_would_change_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os\nA = os.environ['RANK']")
    script = script_of(*INHERITED, *IMPORTED_BY_RANKS) + "print(os.environ['SET_BY_QUIET'])"
    ended = run(tmp_path, "--preload", "auto", script=script)
    assert ended.returncode == 0, ended.stderr
    names = " ".join(sorted(INHERITED))
    expected = [*(f"[{rank}] {line}" for rank in (0, 1) for line in (f"{names} {rank}", "yes"))]
    lines = ended.stdout.splitlines()
    assert sorted(line for line in lines if line[0] == "[") == sorted(expected)
    assert set(lines) - set(expected) == {"printed once"}
    (said,) = ended.stderr.splitlines()
    reasons = "; ".join(f"{name} ({reason})" for name, (_, reason) in IMPORTED_BY_RANKS.items())
    assert said == f"rankwise: not preloaded, but imported by each rank: {reasons}"


RANDOM = """
import json, multiprocessing, os, random, tempfile, uuid
import numpy, torch
from torch.utils.data import DataLoader
found = {
    "torch": torch.initial_seed(), "torch.rand": torch.rand(1).item(), "random": random.random(),
    "numpy": numpy.random.rand(), "authkey": multiprocessing.current_process().authkey.hex(),
    "temporary": tempfile.mktemp(), "uuid": str(uuid.uuid4()), "system": os.urandom(8).hex(),
    "order": [int(one) for one in DataLoader(range(1000), shuffle=True)],
    "generator": numpy.random.default_rng().random(), "stored": torch.Generator().initial_seed(),
    "worker": [one.item() for one in DataLoader(
        [0], num_workers=1, collate_fn=lambda _: torch.rand(1), multiprocessing_context="fork")],
}
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"found{os.environ['RANK']}-{attempt}", "w").write(json.dumps(found))
while attempt == "0" and not os.path.exists(f"found{1 - int(os.environ['RANK'])}-0"): pass
raise SystemExit(attempt == "0")
"""


@pytest.mark.slow
def test_random_state_differs_between_ranks_and_attempts_as_between_new_processes(tmp_path: Path) -> None:
    """Also where the fork server has imported all modules; a generator without a seed is the same everywhere."""
    ended = run(tmp_path, "--preload", "numpy,random,uuid,tempfile", "--max-restarts", "1", script=RANDOM)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(path.read_text()) for path in tmp_path.glob("found*")]
    assert len(found) == 4
    assert len({str(one.pop("stored")) for one in found}) == 1
    for name in found[0]:
        assert len({str(one[name]) for one in found}) == 4, name


@pytest.mark.usefixtures("site")
def test_a_module_that_cannot_be_preloaded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").touch()
    for name, said in (
        ("nope", "'nope' is not installed"),
        ("own", "in the program's own folder"),
        ("scikit-learn", "not the name of a module"),
    ):
        ended = run(tmp_path, f"--preload={name}", script="")
        assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
    monkeypatch.setenv("RANKWISE_PRELOAD", "nope")
    ended = run(tmp_path, script="")
    assert "RANKWISE_PRELOAD names the module 'nope'" in ended.stderr
    for other in ("--no-preload", "--no-python"):
        assert f"--preload and {other} exclude each other" in run(tmp_path, "--preload=os", other, script="").stderr


@pytest.mark.slow
def test_a_module_that_ends_the_process_is_named(tmp_path: Path, site: Path) -> None:
    (site / "ends.py").write_text("import os; os._exit(5)")
    ended = run(tmp_path, "--preload=ends", script="")
    assert ended.returncode == 1
    assert "ended with exit code 5; no rank is left; it was importing ends" in ended.stderr


@pytest.mark.slow
def test_shared_memory_of_a_module_that_is_not_preloaded_is_removed(tmp_path: Path, site: Path) -> None:
    (site / "shares.py").write_text(
        "from multiprocessing.shared_memory import SharedMemory\nMEMORY = SharedMemory(create=True, size=1)\n"
        f"with open({str(tmp_path / 'names')!r}, 'a') as file: file.write(MEMORY.name + ' ')"
    )
    ended = run(tmp_path, "--preload=shares", script="import shares")
    assert "shares (started a process)" in ended.stderr
    names = (tmp_path / "names").read_text().split()
    assert len(names) == 3  # of the fork server and of two ranks
    assert [name for name in names if Path("/dev/shm", name).exists()] == []


@pytest.mark.slow
def test_ctrl_c_ends_an_import_that_hangs(tmp_path: Path, site: Path) -> None:
    (site / "hangs.py").write_text("import time; print('importing', flush=True); time.sleep(1000)")
    (tmp_path / "script.py").touch()
    command = [RANKWISE, "launch", "--preload=hangs", "script.py"]
    for signum, status in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as launcher:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "importing\n"
            launcher.send_signal(signum)
            assert launcher.wait(60) == status
            assert launcher.stdout.read() == ""  # the fork server, which has it open too, has ended


@pytest.mark.slow
@pytest.mark.usefixtures("site")
def test_the_variable_is_the_default_of_functions_and_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(os.environ["PYTHONPATH"])
    monkeypatch.setenv("RANKWISE_PRELOAD", "quiet")
    assert rw.launch(is_loaded, "quiet", nproc=1) == [True]
    assert rw.launch(is_loaded, "quiet", nproc=1, preload="copies,needs_quiet:quiet") == [True]
    assert rw.launch(is_loaded, "quiet", nproc=1, preload=()) == [False]
    (tmp_path / "script.py").write_text("import sys; print('quiet' in sys.modules)")
    ScriptLaunch(str(tmp_path / "script.py"), nproc=1, preload=False).run()
    assert capfd.readouterr().out == "printed once\n" * 2 + "False\n"


@pytest.mark.slow
def test_every_variable_that_the_launcher_sets_for_a_rank_is_observed() -> None:
    (names,) = rw.launch(variables, nproc=1)
    defaults = {"GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS"}
    assert names - set(os.environ) - defaults - {"RANKWISE_LAUNCH"} <= RANK_VARIABLES


def is_loaded(name: str) -> bool:
    return name in sys.modules


def variables() -> set[str]:
    return set(os.environ)
