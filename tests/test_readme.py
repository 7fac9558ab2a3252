"""What the README shows works as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import rankwise as rw
from tests.session.worlds import run_in

COMMANDS = ("launch", "env", "doctor", "bench", "submit")
README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    script = tmp_path / "example.py"
    script.write_text(example[1])
    ended = run_in(tmp_path, [sys.executable, str(script)])
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in ended.stdout.strip("[]\n").split(",")]
    assert len(losses) == 4
    assert max(losses) < 0.1


@pytest.mark.rare
def test_the_commands_run(tmp_path: Path) -> None:
    """All but those of other launchers, run in tests/clusters, and of hanging jobs, in tests/diagnose.

    `make docs-check` runs it, too.
    """
    section = README.partition("## From the command line")[2].partition("\n## ")[0]
    lines = [
        line.partition("#")[0].split()
        for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
        for line in block.splitlines()
    ]
    commands = [line for line in lines if line[0] in {"rankwise", "python"} and not {"stacks", "--ssh"} & set(line)]
    assert {args[0] for program, *args in commands if program == "rankwise"} == {*COMMANDS}
    (tmp_path / "train.py").write_text("import rankwise as rw\nwith rw.init():\n    print('of', rw.all_reduce(1))\n")
    for program, *args in commands:
        if "submit" in args:
            args.append("--dry-run")
        ended = run_in(tmp_path, [str(Path(sys.executable).with_name(program)), *args])
        assert ended.returncode == 0, ended.stderr
        if "submit" in args:
            assert ended.stderr == "8 ranks of train.py: not submitted\n"
            continue
        ranks = 0 if {"env", "doctor", "bench"} & set(args) else 1 if program == "python" else 4
        shown = 1 if "--show" in args else ranks
        assert ended.stdout.count(f"of {ranks}\n") == shown, (program, args)


def test_the_failure_is_reported_as_shown(tmp_path: Path) -> None:
    """All but the lines that ranks print themselves, which come in any order, and the text that is left out."""
    section = README.partition("## When a rank fails")[2]
    script = re.search(r"```py\n(.*?)```", section, re.DOTALL)
    shown = re.search(r"```text\n(.*?)```", section, re.DOTALL)
    assert script is not None
    assert shown is not None
    (tmp_path / "train.py").write_text(script[1])
    ended = run_in(tmp_path, [str(Path(sys.executable).with_name("rankwise")), "launch", "-n", "2", "train.py"])
    assert ended.returncode == 1
    output = ended.stderr.replace(f"{tmp_path}/", "").replace(f" on {rw.hostname()} ", " on vm ").splitlines()
    lines, printed = ([line for line in text if "^^^" not in line] for text in (shown[1].splitlines(), output))
    assert len(printed) == len(lines), "without the lines that came with Python 3.11"
    for line, real in zip(lines[2:], printed[2:], strict=True):
        assert real.startswith(line.partition(" [...]")[0])
