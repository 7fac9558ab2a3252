"""What the documentation shows works, and what it names exists."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankwise as rw
from benchmarks import ratios
from rankwise._environment.detect import LAUNCHERS
from rankwise._environment.facts import OVERRIDES
from tests.lanes import variants
from tests.session.worlds import run_in
from tests.tables import each_row
from tests.test_public_api import MODULES, TABLE

ROOT = Path(__file__).parents[1]
SOURCE = Path(rw.__file__).parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUN_HERE = [ROOT / "docs" / name for name in ("guide.md", "launchers.md", "environment.md")]
# Pages with programs, and the tests that run these.
RUN_ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "before_and_after.md": "tests/test_recipes.py",
    "engines.md": "tests/clusters/test_slurm_engine.py, test_ray_engine.py: functions as these",
    "migrate.md": "tests/compat/test_migrate.py",
    "start.md": "tests/test_recipes.py",
    "testing.md": "tests/testing/test_page.py",
    "xla.md": "make test-xla: functions as these",
}
ENVIRONMENT = (ROOT / "docs" / "environment.md").read_text()
BIN = Path(sys.executable).parent

# Each example as a script of its own, in one process: most of the time of a script is `import torch`.
RUN_ALL = "import runpy, sys\nfor script in sys.argv[1:]:\n    runpy.run_path(script, run_name='__main__')\n"


@pytest.mark.parametrize("ranks", variants([1, 2], slow=[2]))
def test_every_example_of_the_guide_runs(ranks: int, tmp_path: Path) -> None:
    text = "\n".join(page.read_text() for page in RUN_HERE)
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) >= 6
    if ranks > 1:
        examples = [example for example in examples if "rw.launch(" not in example]
    scripts = [tmp_path / f"example{number}.py" for number in range(len(examples))]
    for script, example in zip(scripts, examples, strict=True):
        script.write_text(example)
    (tmp_path / "all.py").write_text(RUN_ALL)
    start = [sys.executable] if ranks == 1 else [str(BIN / "rankwise"), "launch", "-n", str(ranks)]
    ended = run_in(tmp_path, [*start, "all.py", *(script.name for script in scripts)])
    assert ended.returncode == 0, ended.stderr
    assert f"on {ranks} ranks" in ended.stdout
    assert (tmp_path / "model.pt").read_bytes()
    assert ("Missing: rank 1" in ended.stdout) == (ranks > 1)


def test_every_page_with_a_program_has_a_test_that_runs_it() -> None:
    with_programs = {page for page in PAGES if "```python" in page.read_text()} - set(RUN_HERE)
    left = {page.name for page in with_programs if page.parent.name not in {"recipes", "decisions"}}
    assert left == RUN_ELSEWHERE.keys()


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as they are made of its headings."""
    lines = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
    titles = [line.lstrip("# ") for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_row("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), target


# docs/migrate.md names files of other projects.
@each_row("page", [page for page in PAGES if page.name != "migrate.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_repository_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"[` \"]((?:tests|docs|src|benchmarks|examples)/[\w./-]*\w)", text):
        assert list(ROOT.glob(f"{name}*")), name


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text() for page in ROOT.glob("docs/reference/*.rst"))
    entries = re.findall(r"^\.\. (?:auto|py:)(?:function|class|exception|data):: ([\w.]+)", text, re.MULTILINE)
    assert len(entries) == len(set(entries))
    of_package = {f"rankwise.{name}" for name in rw.__all__}
    assert of_package <= set(entries)
    for module in MODULES:
        names = re.findall(rf"^{re.escape(module)}\.(\w+)(?![\w.])", TABLE.read_text(), re.MULTILINE)
        own = [name for name in names if f"rankwise.{name}" not in of_package]
        assert "compat" in module or {f"{module}.{name}" for name in own} <= set(entries), module


def test_the_plot_of_the_benchmarks_is_that_of_their_table() -> None:
    assert len(ratios.rows()) == 8
    assert ratios.PLOT.read_text() == ratios.plot(), "run python -m benchmarks.ratios"


def test_what_the_commands_of_contributing_select_exists() -> None:
    commands = re.findall(r"-m pytest (.*?)(?: +#|\n)", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(commands) >= 5
    for file, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", " ".join(commands)):
        assert f"def {test}(" in (ROOT / file).read_text()


def test_the_table_of_variables_is_complete() -> None:
    """Literals of the source, and the overrides, which are built there from a prefix."""
    literals = {
        name for path in SOURCE.rglob("*.py") for name in re.findall(r'"(_?RANKWISE_[A-Z_]*[A-Z])"', path.read_text())
    }
    shown = set(re.findall(r"`(_?RANKWISE_[A-Z_]+)[`=]", ENVIRONMENT))
    # click makes this one of the command's name.
    assert shown == literals | set(OVERRIDES) | {
        "RANKWISE_CHECK",
        "RANKWISE_PRELOAD",
        "RANKWISE_SHARED_MEMORY",
        "_RANKWISE_COMPLETE",
    }


def rows(page: str, heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the table under a heading."""
    table = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_of_launchers_is_in_their_order() -> None:
    cells_of = {cells[0].strip("`"): cells for cells in rows(ENVIRONMENT, "Variables of launchers")}
    table = {name: cells[2] for name, cells in cells_of.items()}
    assert list(table) == [launcher.name for launcher in LAUNCHERS]
    for launcher in LAUNCHERS:
        assert cells_of[launcher.name][4] == ("yes" if launcher.verified else "*unverified*")
    for launcher in LAUNCHERS[:-1]:
        names = re.findall(r"`(\w+)`", table[launcher.name])
        if launcher.name == "tpu":
            assert table[launcher.name].startswith("only if named")
            continue
        environ = dict.fromkeys(names, "1" if launcher.name == "kubeflow" else "0")
        assert set(re.findall(r"`(\w+)`", cells_of[launcher.name][3])) <= set(launcher.variables)
        if launcher.name == "rankwise":
            environ["RANKWISE_RUN_ID"] = "0@:"
        assert launcher.present(environ), "by these variables"
        for missing in names:
            assert not launcher.present({name: environ[name] for name in names if name != missing}), missing
