"""A script runs as under `python script.py`, except for the variables of its rank."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise._launch.late_variables import late_setting_warning
from tests.lanes import variants
from tests.session.worlds import clean_environ

HERE = Path(__file__).parent
PYTHON = [sys.executable]
LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch", "-n", "1"]

# Torch adds some when it is imported; scripts import it too.
NOT_COMPARED = {"executable", "filters"}

# An object in a cycle, and one that the main module alone holds.
TEMPORARY = """
import shutil, tempfile
class Folder:
    def __init__(self): self.path = tempfile.mkdtemp()
    def __del__(self):
        shutil.rmtree(self.path)
        print("removed")
one, other = Folder(), Folder()
other.itself = other
"""

ENDINGS = {
    "nothing": "pass",
    "exit()": "import sys; sys.exit()",
    "exit(None)": "import sys; sys.exit(None)",
    "exit(0)": "import sys; sys.exit(0)",
    "exit(3)": "import sys; sys.exit(3)",
    "exit(256)": "import sys; sys.exit(256)",
    "exit(-1)": "import sys; sys.exit(-1)",
    "exit(text)": "import sys; print('before'); sys.exit('text')",
    "exit(object)": "import sys; sys.exit([1, 2])",
    "os._exit": "import os; print('lost or not', flush=True); os._exit(5)",
    "raise": "def f():\n    raise ValueError('no')\nf()",
    "raise below many frames": "import sys\nsys.setrecursionlimit(10**5)\ndef f(n):\n"
    "    return f(n - 1) if n else 1 / 0\nf(900)",
    "raise what cannot be shown": "class E(RuntimeError):\n    def __str__(self): raise KeyError\nraise E",
    "raise from": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[1])\n1 / 0",
    "excepthook raises": "import sys\ndef hook(*a):\n    raise KeyError('k')\nsys.excepthook = hook\n1 / 0",
    "excepthook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(5)\n1 / 0",
    "syntax": "print('a'\n",
    "import": "import no_such_module",
    "thread raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start()\nt.join()",
    "thread runs": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), print('later'))).start()",
    "daemon runs": "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()",
    "atexit": "import atexit\natexit.register(print, 'one')\natexit.register(print, 'two')\nraise SystemExit(4)",
    "atexit raises": "import atexit\natexit.register(lambda: 1 / 0)",
    "unclosed file": "import sys\nf = open(sys.argv[1], 'w')\nf.write('kept')",
    "global __del__": "class A:\n    def __del__(self):\n        print('deleted')\na = A()",
    "__del__ uses globals": TEMPORARY,
    "__del__ after an error": TEMPORARY + "raise ValueError('no')",
    "suspended generator": "import sys\ndef f():\n    try:\n        yield\n    finally:\n        print(X)\nX = 1\n"
    "g = f()\nnext(g)",
    "last_value": "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\n1 / 0",
    "interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "SIGTERM": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "import os, signal\nprint('x', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)",
    "SIGABRT": "import os\nos.abort()",
    "forked child": "import os\npid = os.fork()\nprint('child' if not pid else os.waitpid(pid, 0)[1])",
    "forked child raises": "import os\nif not os.fork():\n    raise ValueError('child')\nprint(os.wait()[1])",
    "bytes": "import sys\nsys.stdout.buffer.write(bytes(range(256)))",
    "futures": "from concurrent.futures import *\nwith ThreadPoolExecutor() as p:\n    print(list(p.map(abs, [-1])))",
    "stderr": "import sys\nprint('out')\nprint('err', file=sys.stderr)",
    "closed stdout": "import sys\nsys.stdout.close()",
}
FAST = {"raise"}
SLOW = {"exit(text)", "excepthook raises", "interrupt"}
# Those without an error, which ranks of one launch reach side by side.
WELL = [
    *("nothing", "exit()", "exit(None)", "exit(0)", "exit(256)", "thread raises", "thread runs", "daemon runs"),
    *("atexit raises", "unclosed file", "global __del__", "__del__ uses globals", "suspended generator"),
    *("forked child", "forked child raises", "bytes", "futures", "stderr", "closed stdout"),
]
EXTRA: list[list[str]] = [[], ["--no-preload"]]
# The script of a rank, which has the number of its own ending.
OWN_ENDING = """import os
with open(os.environ["RANK"] + ".py") as _file:
    _code = _file.read()
exec(compile(_code, "script.py", "exec"))
"""


def run(command: list[str], *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    # As in a user's terminal: a search path of their own, a variable that is hard to quote.
    environ = clean_environ(ODD="=x=\n y")
    return subprocess.run(
        [*command, *args],
        cwd=cwd,
        env=environ,
        input=b"line\n",
        capture_output=True,
        timeout=200,
        check=False,
        umask=0o27,
    )


def without_addresses(text: bytes) -> bytes:
    return re.sub(rb"0x[0-9a-f]+", b"0x", text)


@pytest.mark.parametrize(
    ("target", "extra"),
    [
        pytest.param(["programs/probe.py"], [], id="script-forked"),
        pytest.param(["programs/probe.py"], ["--no-preload"], id="script-fresh", marks=pytest.mark.rare),
        pytest.param(["-m", "programs.probe"], [], id="module-forked", marks=pytest.mark.slow),
        pytest.param(["-m", "programs.probe"], ["--no-preload"], id="module-fresh", marks=pytest.mark.rare),
    ],
)
def test_a_script_sees_the_same_as_under_python(target: list[str], extra: list[str]) -> None:
    args = [*target, "--lr", "0.1", "two words", ""]
    wanted = run(PYTHON, *args, cwd=HERE)
    found = run([*LAUNCH, *extra], *args, cwd=HERE)
    assert (found.returncode, found.stderr) == (wanted.returncode, wanted.stderr) == (0, b"")
    ours, pythons = (json.loads(ended.stdout.splitlines()[0]) for ended in (found, wanted))
    assert {name: seen for name, seen in ours.items() if name not in NOT_COMPARED} == {
        name: seen for name, seen in pythons.items() if name not in NOT_COMPARED
    }
    assert found.stdout.splitlines()[1:] == wanted.stdout.splitlines()[1:] == [b"a thread", b"at exit"]


@pytest.mark.parametrize("ending", variants([ending for ending in ENDINGS if ending not in WELL], fast=FAST, slow=SLOW))
def test_a_script_ends_as_it_ends_under_python(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDINGS[ending])
    file = tmp_path / "file"
    wanted = run(PYTHON, str(script), str(file))
    written = file.read_bytes() if file.exists() else None
    file.unlink(missing_ok=True)
    found = run(LAUNCH, str(script), str(file))
    assert found.stdout == wanted.stdout
    code = wanted.returncode
    assert found.returncode == (code if code >= 0 else 128 - code), found.stderr
    before, _, report = found.stderr.partition(b"rankwise: ")
    assert bool(report) == (code != 0)
    assert without_addresses(wanted.stderr).strip() in without_addresses(before + report), "tracebacks to the letter"
    assert (file.read_bytes() if file.exists() else None) == written


@pytest.mark.slow
def test_scripts_that_end_well_end_as_they_end_under_python(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(OWN_ENDING)
    for rank, ending in enumerate(WELL):
        (tmp_path / f"{rank}.py").write_text(ENDINGS[ending].replace("sys.argv[1]", f"'file{rank}'"))
    wanted = [run(["env", f"RANK={rank}", *PYTHON], "main.py", cwd=tmp_path) for rank in range(len(WELL))]
    files = {path: path.read_bytes() for path in tmp_path.glob("file*")}
    assert len(files) == 1
    for path in files:
        path.unlink()
    options = ["-n", str(len(WELL)), "--log-dir", "logs", "--redirects", "3"]
    ended = run(LAUNCH[:2], *options, "main.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for rank, (ending, alone) in enumerate(zip(WELL, wanted, strict=True)):
        assert alone.returncode == 0, ending
        out, err = (next(tmp_path.glob(f"logs/*/attempt_0/{rank}/std{name}.log")) for name in ("out", "err"))
        assert out.read_bytes() == alone.stdout, ending
        assert without_addresses(err.read_bytes()) == without_addresses(alone.stderr), ending
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.parametrize("extra", variants(EXTRA, slow=EXTRA[:1]), ids=["forked", "fresh"])
def test_streams_are_unbuffered_if_python_is_started_so(extra: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('partial', sys.stdout.write_through, end='')\nos._exit(0)\n")
    for setting, wanted in (("PYTHONUNBUFFERED=1", b"partial True"), ("PYTHONUNBUFFERED=", b"")):
        for command in (PYTHON, [*LAUNCH, *extra]):
            assert run(["env", setting, *command], str(script)).stdout == wanted


@pytest.mark.rare
def test_a_number_of_threads_that_is_set_too_late_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n"
        "if sys.argv[1:]:\n    torch.set_num_threads(2)\nprint(torch.get_num_threads())\n"
    )
    launch = ["env", "OMP_NUM_THREADS=1", *LAUNCH]
    late = run(launch, str(script))
    assert (late.returncode, late.stdout) == (0, b"1\n")
    assert late.stderr.startswith(b"rankwise: the script has set OMP_NUM_THREADS=2 after torch was loaded, too late")
    for extra, args in (([], ["itself"]), (["--no-preload"], [])):
        wanted, found = run(PYTHON, str(script), *args), run([*launch, *extra], str(script), *args)
        assert (found.returncode, found.stdout, found.stderr) == (0, wanted.stdout, b"")


def test_variables_that_torch_reads_as_it_is_imported_are_reported_if_a_script_sets_them() -> None:
    before = {"TORCH_LOGS": "+dynamo", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OTHER": "1"}
    assert not late_setting_warning(before, {**before, "OTHER": "2"})
    # Of the allocator, torch reads the options later, but chooses the backend as it is imported.
    assert not late_setting_warning(before, {**before, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    after = {**before, "TORCH_LOGS": "+aot", "PYTORCH_CUDA_ALLOC_CONF": "a:1,backend:cudaMallocAsync"}
    assert late_setting_warning(before, after) == (
        "rankwise: the script has set TORCH_LOGS, PYTORCH_CUDA_ALLOC_CONF after torch was loaded, too late: set it "
        "before `rankwise launch`, or start with --no-preload\n"
    )


@pytest.mark.slow
def test_nothing_is_left_open_that_python_would_warn_of(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('x')\n")
    found = run(["env", "PYTHONWARNINGS=error", "PYTHONDEVMODE=1", *LAUNCH], str(script))
    assert (found.returncode, found.stdout, found.stderr) == (0, b"x\n", b"")


@pytest.mark.parametrize("extra", variants(EXTRA, slow=EXTRA[:1]), ids=["forked", "fresh"])
def test_a_script_is_shown_by_its_command_and_can_execute_itself_again(extra: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "if 'AGAIN' not in os.environ:\n"
        "    print(pathlib.Path('/proc/self/cmdline').read_text().rstrip(chr(0)), flush=True)\n"
        "    os.environ['AGAIN'] = '1'\n"
        "    os.execv(sys.executable, sys.orig_argv)\n"
        "print('again', sys.argv[1:], os.environ['RANK'])\n"
    )
    found = run(["env", "-u", "PYTHONDONTWRITEBYTECODE", *LAUNCH, *extra], str(script), "--lr", "two words")
    assert (found.returncode, found.stderr) == (0, b"")
    title, again = found.stdout.decode().splitlines()
    assert title == f"{sys.executable} {script} --lr two words [rank 0]"
    assert again == "again ['--lr', 'two words'] 0"


@pytest.mark.rare
def test_output_that_cannot_be_written_at_the_end_is_reported_as_under_python(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('x', end='')\n")
    shell = ["env", "PYTHONUNBUFFERED=", "sh", "-c", 'exec "$@" >/dev/full', "sh"]
    wanted, found = run([*shell, *PYTHON], str(script)), run([*shell, *LAUNCH], str(script))
    assert found.returncode == wanted.returncode == 120
    (begin, error), shown = wanted.stderr.splitlines(), found.stderr.splitlines()
    assert begin.startswith(b"Exception ignored ")  # the rest depends on the version
    assert shown[:2] == [b"Exception ignored while flushing sys.stdout:", error]


@pytest.mark.rare
def test_a_folder_and_an_archive_run(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import helper, sys\nprint(helper.X, __name__, __file__, sys.argv)\n")
    (tmp_path / "app" / "helper.py").write_text("X = 1\n")
    subprocess.run([sys.executable, "-m", "zipapp", "app", "-o", "app.pyz"], cwd=tmp_path, check=True)
    for target in ("app", "app.pyz"):
        wanted, found = run(PYTHON, target, "a", cwd=tmp_path), run(LAUNCH, target, "a", cwd=tmp_path)
        assert (found.returncode, found.stdout) == (0, wanted.stdout), found.stderr


@pytest.mark.slow
def test_a_program_runs() -> None:
    found = run(LAUNCH, "--no-python", "sh", "-c", "echo $RANK $WORLD_SIZE $0; exit 4", "zero")
    assert (found.returncode, found.stdout) == (4, b"0 1 zero\n")


@pytest.mark.rare
def test_a_data_loader_has_workers(tmp_path: Path) -> None:
    script = tmp_path / "load.py"
    script.write_text(
        "import torch\n"
        "class Numbers(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index): return index\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn'):\n"
        "        loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context=method)\n"
        "        print(method, sum(int(batch) for batch in loader))\n"
    )
    found = run(LAUNCH, str(script))
    assert (found.returncode, found.stdout) == (0, b"fork 28\nspawn 28\n"), found.stderr


@pytest.mark.slow
def test_ranks_draw_different_random_numbers(tmp_path: Path) -> None:
    script = tmp_path / "draw.py"
    script.write_text("import numpy, random\nprint(random.random(), numpy.random.rand())\n")
    found = run([*LAUNCH[:-1], "3", "--no-prefix"], str(script))
    drawn = found.stdout.split()
    assert len(drawn) == len(set(drawn)) == 6, found
