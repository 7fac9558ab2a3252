"""The programs in `tools/`: combinations of `make compat`, paths of `tools.hops`, records, seeded faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from tests.tables import each_row
from tools import behaviour, check_site, compat, hops, mutants, record_errors
from tools.faults import FAULTS, Fault
from tools.gpu_checks import CHECKS, Check
from tools.gpu_first_hour import run_check
from tools.inventories import trimmed
from tools.stub_libraries import forget_cuda, write_stubs
from tools.virtualenv import CommandError, run

# The longest path of a 16-byte all_reduce on 2 ranks; the goal is 8 files and 40 functions, torch has 2 and 9.
MOST_FILES = 20
MOST_FUNCTIONS = 52

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_passes"><properties/></testcase>
<testcase classname="tests.test_a" name="test_fails"><failure message="assert 1 == 2&#10;x">text</failure></testcase>
<testcase classname="tests.test_a" name="test_skips"><skipped message="no GPU"/></testcase>
<testcase classname="tests.test_b" name=""><error message="collection failure">trace</error></testcase>
</testsuite></testsuites>"""


def test_the_oldest_and_the_newest_are_combined() -> None:
    first, *_, last = compat.combinations()
    assert (first.python, first.torch, first.dependencies) == ("3.11", "2.11", compat.LOWEST)
    assert (last.torch, last.dependencies) == (compat.NEWEST, compat.NEWEST)
    assert compat.own_python() not in {one.python for one in compat.combinations()[1:-1]}


def test_the_lowest_dependencies_are_those_of_the_project() -> None:
    assert compat.lower_bounds().keys() == {"torch", "optree", "cloudpickle", "psutil", "click"}


def test_results_are_counted_and_written(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)
    combination = compat.Combination(python="3.12", torch="2.13.0", dependencies=compat.PINNED)
    compat.read_results(combination, tmp_path / "results.xml")
    assert combination.result == "1 passed, 2 failed, 1 skipped"
    assert combination.failures == [
        "tests.test_a::test_fails: assert 1 == 2",
        "tests.test_b::: collection failure",
    ]
    old = "| fast | 3.9 | 2.0 | lowest | 1 | 0 | 0 | 1 | 2020-01-01 |\n"
    other = old.replace("fast", "all")
    page = f"before\n{compat.HEADER}{compat.RULE}{old}{other}\nafter\n"
    combination.seconds = 200.0
    row = "| fast | 3.12 | 2.13.0 | constraints.txt | 1 | 2 | 1 | 3 | 2030-01-01 |\n"
    written = compat.with_results(page, "fast", [combination], "2030-01-01")
    assert written == f"before\n{compat.HEADER}{compat.RULE}{other}{row}\nafter\n"
    with pytest.raises(CommandError, match="no table"):
        compat.with_results("", "fast", [combination], "2030-01-01")


def test_the_page_has_a_table_for_results() -> None:
    compat.with_results(compat.PAGE.read_text(), "fast", [], "2030-01-01")


def test_a_missing_interpreter_is_skipped() -> None:
    combination = compat.Combination(python="3.1", torch="2.8", dependencies=compat.NEWEST)
    compat.check(combination, tests=[], keep=False)
    assert combination.result == "skipped: there is no such interpreter"


TOOLKIT = 'Requires-Dist: cuda-toolkit[cublas,cudart]==13.0.2; platform_system == "Linux"\n'


@pytest.mark.parametrize(("toolkit", "kept"), [(TOOLKIT, ["cuda-toolkit[cudart,cupti]==13.0.2"]), ("", [])])
def test_a_torch_forgets_the_packages_of_cuda(toolkit: str, kept: list[str], tmp_path: Path) -> None:
    metadata = tmp_path / "torch-2.13.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    others = "Name: torch\nRequires-Dist: filelock\n"
    metadata.write_text(f"{others}{toolkit}Requires-Dist: nvidia-nccl-cu13==2.28.9\nRequires-Dist: triton==3.6.0\n")
    assert forget_cuda(tmp_path) == kept
    assert metadata.read_text() == others


def test_a_library_that_is_missing_gets_a_stub(tmp_path: Path) -> None:
    """A library of torch that refers to one of CUDA is loaded, and a call of a function of that ends with its name."""
    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "cuda.c").write_text("int nvrtcVersion(void) { return 1; }")
    (tmp_path / "torch.c").write_text("int nvrtcVersion(void); int version(void) { return nvrtcVersion(); }")
    build = ["gcc", "-shared", "-fPIC", "-Wl,-rpath,$ORIGIN", "-o"]
    cuda, library = str(folder / "libnvrtc.so.13"), str(folder / "libtorch_cuda.so")
    run([*build, cuda, str(tmp_path / "cuda.c"), "-Wl,-soname,libnvrtc.so.13"])
    run([*build, library, str(tmp_path / "torch.c"), cuda])
    Path(cuda).unlink()
    assert write_stubs(tmp_path) == ["libnvrtc.so.13"]
    program = f"import ctypes; ctypes.PyDLL({library!r}, 2).version()"  # 2: RTLD_NOW
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert ended.stderr.startswith("libnvrtc.so.13 is a stub: nvrtcVersion was called")


@pytest.mark.ranks(2)
def test_the_path_of_an_all_reduce_is_short(session: rw.Session) -> None:
    # Several times: on a busy machine, a rank that waits takes another way each time.
    path = min((hops.shortest_path("all_reduce")["rankwise"] for _ in range(5)), key=len)
    assert len(hops.files_of(path)) <= MOST_FILES
    assert len(path) <= MOST_FUNCTIONS
    assert path[0].name == "all_reduce"
    assert path[0].depth == 0
    assert all(hop.depth > 0 for hop in path[1:])


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_paths_of_other_collectives_are_found(session: rw.Session) -> None:
    for operation in hops.OPERATIONS[1:]:
        paths = hops.shortest_path(operation)
        assert all(len(path) > 1 and path[0].depth == 0 for path in paths.values()), operation


def test_an_exception_has_four_forms_on_its_way_to_the_terminal() -> None:
    forms = hops.forms_of_failure()
    assert forms["rank 1"][0] == "ValueError", "the original"
    assert {form for of_process in forms.values() for form in of_process} == {
        "ValueError", "RemoteRankError", "RankFailure", "RankFailedError",
    }  # fmt: skip


def test_texts_of_errors_are_masked() -> None:
    text = "rank 12 on vm failed at /home/a/train.py:7 after 0.5 s: ranks 1, 2 and 5\n\nTraceback (most recent call):\n"
    assert behaviour.masked(text) == "rank N on vm failed at PATH:N after N s: ranks N [traceback]"


def test_records_of_two_runs_are_compared(tmp_path: Path) -> None:
    records = {
        "before": (["passed a", "passed b"], ["E: one", "E: late"]),
        "again": (["passed a", "passed b"], ["E: one"]),
        "after": (["passed a", "failure b"], ["E: two"]),
    }
    for name, (outcomes, errors) in records.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "outcomes.txt").write_text("".join(f"{line}\n" for line in outcomes))
        (tmp_path / name / "errors.txt").write_text("".join(f"{line}\n" for line in errors))
    found = behaviour.differences(tmp_path / "before", tmp_path / "after", noise=tmp_path / "again")
    assert found == ["- passed b", "+ failure b", "- E: one", "+ E: two"]


def test_errors_of_a_process_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    program = (
        f"import sys; sys.path.insert(0, {str(Path(record_errors.__file__).parent)!r}); import record_errors\n"
        f"record_errors.to({str(tmp_path / 'raw')!r})\n"
        "from rankwise.errors import InvalidArgumentError\n"
        "InvalidArgumentError('op is wrong'), InvalidArgumentError('op is wrong')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
    (file,) = (tmp_path / "raw").iterdir()
    assert file.read_text() == '["InvalidArgumentError", "op is wrong"]\n'


def test_every_seeded_fault_applies_and_has_its_tests() -> None:
    assert {fault.name: why for fault in FAULTS if (why := mutants.problem(fault))} == {}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_the_recorded_kills_are_those_of_seeded_faults() -> None:
    """`python -m tools.mutants --save tests/data/mutants.json` records them."""
    recorded: dict[str, str] = json.loads((mutants.ROOT / "tests" / "data" / "mutants.json").read_text())
    assert recorded.keys() <= {fault.name for fault in FAULTS}
    assert [name for name, killer in recorded.items() if not mutants.is_kill(killer)] == []


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"file": "none.py"}, "there is no src/rankwise/none.py"),
        ({"text": "no such text"}, "has its text 0 times"),
        ({"text": '"""'}, "has its text 2 times"),
        ({"replacement": "if ("}, "syntax error"),
        ({"tests": ()}, "no tests"),
        ({"tests": ("tests/none.py",)}, "there is no tests/none.py"),
        ({"tests": ("tests/test_tools.py::test_none[1]",)}, "has no test_none"),
    ],
)
def test_a_seeded_fault_that_cannot_be_used_is_named(changed: dict[str, Any], why: str) -> None:
    fault = Fault("a fault", "__main__.py", "if __name__", "if not __name__", "", ("tests/test_tools.py",), 1)
    assert mutants.problem(fault) == ""
    assert why in mutants.problem(replace(fault, **changed))


# A test that starts a process in a session of its own, and fails.
FAILING = """
import subprocess, sys
import rankwise

def test_fails():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    with open({started!r}, "w") as file:
        file.write(f"{{rankwise.__file__}} {{other.pid}}")
    assert False
"""
RUN = """
from dataclasses import replace
from tools import mutants

mutants.adopt_orphans()
mutants.problem = lambda fault: ""
print(mutants.run(replace(mutants.FAULTS[0], tests=({test!r},), limit=200), is_applied=False).killer)
"""
OUTPUT = """tests/a.py::test_passes[x y] PASSED
tests/a.py::test_skips SKIPPED (no GPU)
tests/b.py::test_last[1]{}
"""


@each_row(
    ("status", "output", "killer"),
    [
        (0, OUTPUT.format(" PASSED"), mutants.SURVIVED),
        (1, OUTPUT.format(" FAILED"), "tests/b.py::test_last[1]"),
        (1, OUTPUT.format(" PASSED\ntests/b.py::test_last[1] ERROR"), "tests/b.py::test_last[1]"),
        (2, "ERROR tests/c.py - ImportError: x\n", "tests/c.py"),
        (None, OUTPUT.format(" "), "tests/b.py::test_last[1] (time limit)"),
        (None, "", "pytest (time limit)"),
        (4, "ERROR: not found: x\n", "does not apply: ERROR: not found: x"),
        (-11, "Fatal Python error\n", "pytest (exit status -11): Fatal Python error"),
    ],
)
def test_the_test_that_kills_a_fault_is_found(status: int | None, output: str, killer: str) -> None:
    assert mutants.killer(status, output) == killer


def test_lost_kills_are_found() -> None:
    before = {
        "a": "tests/a.py::t",
        "b": "tests/b.py::t",
        "c": "tests/c.py::t",
        "d": mutants.SURVIVED,
        "e": "tests/e.py",
    }
    after = {"a": "tests/z.py::t (time limit)", "b": mutants.SURVIVED, "c": f"{mutants.UNUSABLE}gone", "d": "survived"}
    assert mutants.lost_kills(before, after) == {
        "b": mutants.SURVIVED, "c": f"{mutants.UNUSABLE}gone", "e": "is not in the table"
    }  # fmt: skip


def test_tests_run_with_a_copy_of_the_package_and_leave_nothing(tmp_path: Path) -> None:
    test, started = tmp_path / "test_of_a_fault.py", tmp_path / "started"
    test.write_text(FAILING.format(started=str(started)))
    program = RUN.format(test=str(test))
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=mutants.ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout.endswith("test_of_a_fault.py::test_fails\n")
    package, pid = started.read_text().split()
    assert not package.startswith(str(mutants.ROOT))
    assert not Path(f"/proc/{pid}").exists()


PROGRAMS = {
    "print('measured: 3 GB/s')\nprint('done')": ("passed", "3 GB/s"),
    "print('something else')": ("FAILED: no 'done' in the output", ""),
    "print('not seen: there is no record')": ("not seen: there is no record", ""),
    "import time\ntime.sleep(100)": ("not over after 2 s", ""),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_row_of_a_check_of_an_accelerator(program: str, tmp_path: Path) -> None:
    check = Check(question="?", ranks=0, program=program, expected=("done",), devices=1, limit=2.0)
    question, verdict, measured, _seconds = run_check(check, 1, tmp_path)
    assert (question, (verdict, measured)) == ("?", PROGRAMS[program])
    assert run_check(replace(check, devices=2), 1, tmp_path)[1] == "not seen: needs 2 devices"


def test_the_programs_for_an_accelerator_can_be_compiled() -> None:
    for check in CHECKS:
        compile(check.program, check.question, "exec")


def test_an_inventory_is_trimmed_to_the_names_that_are_used() -> None:
    entries = b"""a.B py:class 1 a.html#$ -
a.C py:class 1 a.html#a.C -
a.D py:class 1 a.html#$ -
a.E std:label 1 a.html#$ About E
"""
    inventory = b"# Sphinx inventory version 2\n# Project: a\n# Version: 1\n# zlib\n" + zlib.compress(entries)
    assert trimmed(inventory, {"a.B", "a.C", "a.E"}) == ["a.B class a.html", "a.C class a.html"]


def test_links_of_the_site_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    links = ("#here", "b.html#there", "c.html", "https://a", "http://a.b")
    (tmp_path / "a.html").write_text('<p id="here">' + "".join(f'<a href="{link}">' for link in links))
    (tmp_path / "b.html").write_text('<a href="a.html#here"><a href="https://a.b/c">')
    assert list(check_site.broken_links(tmp_path)) == [
        "a.html: b.html#there has no such anchor",
        "a.html: c.html does not exist",
        "a.html: https://a is not a link to another site",
        "a.html: http://a.b is not a link to another site",
    ]


def test_pictures_of_the_site_are_taken_where_there_is_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "none of chromium, " in check_site.pictures(tmp_path, tmp_path / "pictures")
    browser = tmp_path / "chromium"
    browser.write_text('#!/bin/sh\necho "$@" > "${5#--screenshot=}"\n')
    browser.chmod(0o755)
    assert "pictures to look at" in check_site.pictures(tmp_path, tmp_path / "pictures")
    assert {"start-phone.png", "start-desktop.png"} <= {path.name for path in (tmp_path / "pictures").iterdir()}


def test_every_picture_is_there_and_shows_no_path_of_a_machine() -> None:
    pictures = pytest.importorskip("tools.pictures", reason="pyte is of the group docs")
    files = {path.stem: path.read_text() for path in pictures.FOLDER.glob("*.svg")}
    assert files.keys() == pictures.PICTURES.keys()
    for name, text in files.items():
        assert pictures.PICTURES[name].shown.replace(" ", "&#160;") in text
        assert not re.search(r"/(home|root|work|tmp)/", text), name
