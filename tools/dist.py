"""Build the sdist and the wheel, and check both as their users get them: `make dist`.

Prints one line for each check. Nothing is published.
"""

from __future__ import annotations

import re
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from tools.virtualenv import ROOT, CommandError, Virtualenv, run

DIST = ROOT / "dist"

SCRIPT = """\
import rankwise as rw

with rw.init():
    print("rank", rw.get_rank(), "sum", rw.all_reduce(rw.get_rank()))
"""

TEST = """\
import pytest
import torch

import rankwise as rw


@pytest.mark.ranks("serial", 1, 2)
def test_sum(world):
    assert rw.all_reduce(torch.ones(2)).tolist() == [world.world_size] * 2
"""


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist; return both files."""
    virtualenv = Virtualenv(folder / "build")
    virtualenv.install("build", "twine")
    for old in DIST.glob("*"):
        old.unlink()
    again = folder / "again"
    for outdir in (DIST, again):
        run([virtualenv.python, "-m", "build", "--outdir", str(outdir)])
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    for file in (sdist, wheel):
        if (again / file.name).read_bytes() != file.read_bytes():
            raise CommandError(f"two builds of {file.name} differ")
    print("ok  two builds are equal, byte for byte")
    print(f"ok  built {sdist.name} ({size(sdist)}), and from it {wheel.name} ({size(wheel)})")
    run([virtualenv.python, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
    print("ok  metadata: twine check --strict")
    return sdist, wheel


def size(file: Path) -> str:
    return f"{file.stat().st_size / 1000:.0f} kB"


def check_wheel(wheel: Path) -> None:
    """Check that the wheel has every file of the package, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "rankwise").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {name for name in names if ".dist-info/" not in name}
    if found != package:
        raise CommandError(f"{wheel.name}: missing {sorted(package - found)}, unexpected {sorted(found - package)}")
    for wanted in ("rankwise/py.typed", "licenses/LICENSE", "entry_points.txt"):
        if not any(name.endswith(wanted) for name in names):
            raise CommandError(f"{wheel.name} has no {wanted}")
    print(f"ok  the wheel has the {len(package)} files of the package, py.typed and LICENSE, and no others")


def check_sdist(sdist: Path, folder: Path) -> None:
    """Check that the sdist has all that its tests need: every tracked file, and the same tests are collected."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
        archive.extractall(folder, filter="data")
    tracked = set(run(["git", "ls-files"]).splitlines())
    if missing := tracked - names:
        raise CommandError(f"{sdist.name} does not have {sorted(missing)}")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    collected = [number_of_tests(root) for root in (ROOT, unpacked)]
    if collected[0] != collected[1]:
        raise CommandError(f"{collected[0]} tests in the repository, {collected[1]} in the sdist")
    ended = run([sys.executable, "-m", "pytest", "-q", "tests/environment"], cwd=unpacked)
    print(f"ok  the sdist has the {len(tracked)} files of the repository, and its {collected[1]} tests are collected")
    print(f"ok  tests/environment in the unpacked sdist: {ended.splitlines()[-1].strip('= ')}")


def number_of_tests(root: Path) -> int:
    output = run([sys.executable, "-m", "pytest", "--collect-only", "-qq", "-pno:cacheprovider"], cwd=root)
    return sum(int(count) for count in re.findall(r"^tests/\S+: (\d+)$", output, re.MULTILINE))


def check_installed(wheel: Path, folder: Path) -> None:
    """Check the installed wheel from an empty folder: the commands, the plugin, the types and one example."""
    virtualenv = Virtualenv(folder / "installed")
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    virtualenv.install(*constraints, str(wheel), "pytest")
    empty = folder / "empty"
    empty.mkdir()
    (empty / "script.py").write_text(SCRIPT)
    (empty / "test_sum.py").write_text(TEST)
    program = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    if program is None:
        raise CommandError("README.md has no program")
    (empty / "readme.py").write_text(program[1])
    version = wheel.name.split("-")[1]
    rankwise = str(virtualenv.bin / "rankwise")

    expect(rf"rankwise, version {re.escape(version)}\n", [rankwise, "--version"], empty)
    expect(rf"rankwise, version {re.escape(version)}\n", [virtualenv.python, "-m", "rankwise", "--version"], empty)
    expect(r"Commands:\n(  \w+ .*\n)*  launch ", [rankwise, "--help"], empty)
    expect(r"^launcher +none", [rankwise, "env"], empty)
    expect(
        r"rank 0 sum 1\n(.|\n)*rank 1 sum 1|rank 1 sum 1\n(.|\n)*rank 0 sum 1",
        [rankwise, "launch", "-n2", "script.py"],
        empty,
    )
    expect(r"^\[(\d+\.\d+(e-\d+)?(, |\]$)){4}", [virtualenv.python, "readme.py"], empty)
    expect(r"^rank 0 sum 0$", [virtualenv.python, "script.py"], empty)
    expect(r"3 passed", [virtualenv.python, "-m", "pytest", "-q", "-pno:cacheprovider", "test_sum.py"], empty)
    types = str(ROOT / "tests" / "typing" / "programs" / "public_types.py")
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder / "mypy"), "--python-executable"]
    expect("Success: no issues", [*mypy, virtualenv.python, types], empty)

    virtualenv.install(*constraints, f"{wheel}[examples]")
    (empty / "digits.py").write_text((ROOT / "examples" / "digits.py").read_text())
    expect("accuracy", [rankwise, "launch", "-n2", "digits.py", "--epochs", "2"], empty)


def expect(pattern: str, command: list[str], cwd: Path) -> None:
    """Run a command in a folder, and check that its output has a match of a pattern."""
    output = run(command, cwd=cwd)
    shown = " ".join(Path(word).name if "/" in word else word for word in command)
    if not re.search(pattern, output, re.MULTILINE):
        raise CommandError(f"{shown}: no {pattern!r} in its output:\n{output}")
    print(f"ok  installed wheel, empty folder: {shown}")


def main() -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rankwise-dist-") as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        check_wheel(wheel)
        check_sdist(sdist, folder)
        check_installed(wheel, folder)
    print(f"ok  dist/ is complete, after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        sys.exit(f"failed: {error}")
