"""Run the tests with other versions of Python, torch and the other dependencies: `make compat`.

Without arguments: the oldest Python of pyproject.toml with the oldest torch and the oldest dependencies that it allows,
the newest Python with the newest torch and the newest dependencies of the registry, and the Pythons in between with the
versions of constraints.txt. The Python that runs this file is left out there: `make test` has it. The results are in a
table of docs/versioning.md.

Each combination has a virtual environment of its own in `.compat/`, which is removed after its run. Torch's libraries
for CUDA are not installed: `tools/stub_libraries.py` writes stubs for them. The wheels of torch stay in
`.compat/wheels`. A combination is skipped, with the reason, if its interpreter is missing or the disk has too little
room.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tools.results import tests_of
from tools.stub_libraries import forget_cuda, write_stubs
from tools.virtualenv import ROOT, CommandError, Virtualenv, environ, run

CACHE: Final = ROOT / ".compat"
PAGE: Final = ROOT / "docs" / "versioning.md"
FAST: Final = ("-m", "not slow")
IN_PYTEST: Final = ("--numprocesses", "2", "--dist", "worksteal")

# What an environment and the wheel of torch take, in GB.
NEEDED: Final = 4

NEWEST: Final = "newest"
LOWEST: Final = "lowest"
PINNED: Final = "constraints.txt"

HEADER: Final = "| tests | Python | torch | dependencies | passed | failed | skipped | minutes | date |\n"
RULE: Final = "| --- | --- | --- | --- | --: | --: | --: | --: | --- |\n"


@dataclass(slots=True, kw_only=True)
class Combination:
    """Versions of Python, torch and the other dependencies, and the result of the tests with them."""

    python: str
    torch: str
    dependencies: str
    skipped_because: str = ""
    passed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        if self.skipped_because:
            return f"skipped: {self.skipped_because}"
        return f"{self.passed} passed, {len(self.failures)} failed, {self.skipped} skipped"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def lower_bounds() -> dict[str, str]:
    """Return the oldest version that is allowed of each dependency of the package."""
    found = (re.fullmatch(r"([\w-]+)>=([\d.]+)", one) for one in project()["project"]["dependencies"])
    return {one[1]: one[2] for one in found if one is not None}


def combinations() -> list[Combination]:
    """Return the combinations that are promised, each Python once."""
    classifiers = project()["project"]["classifiers"]
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(classifiers))
    pinned = re.search(r"^torch==([\d.]+)$", (ROOT / PINNED).read_text(), re.MULTILINE)
    if pinned is None:
        raise CommandError(f"no torch in {PINNED}")
    return [
        Combination(python=pythons[0], torch=lower_bounds()["torch"], dependencies=LOWEST),
        *(
            Combination(python=python, torch=pinned[1], dependencies=PINNED)
            for python in pythons[1:-1]
            if python != own_python()
        ),
        Combination(python=pythons[-1], torch=NEWEST, dependencies=NEWEST),
    ]


def own_python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def interpreter(version: str) -> str | None:
    """Return an interpreter of a version like 3.12: from PATH, if it starts, or from pyenv's folder."""
    folders = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for candidate in [shutil.which(f"python{version}"), *sorted(str(path) for path in folders)]:
        if candidate is not None:
            asked = subprocess.run([candidate, "--version"], capture_output=True, text=True, timeout=60, check=False)
            if asked.stdout.startswith(f"Python {version}."):
                return candidate
    return None


def install(virtualenv: Virtualenv, combination: Combination) -> None:
    """Install torch without CUDA, and then the package with its other dependencies."""
    virtualenv.install("pip>=25.1")  # which knows dependency groups
    release = "torch" if combination.torch == NEWEST else f"torch=={combination.torch}"
    download = ["pip", "download", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", release]
    output = run([virtualenv.python, "-m", *download], timeout=3600, cwd=wheels())
    wheel = re.findall(r"(torch-\S+\.whl)$", output, re.MULTILINE)[-1]
    virtualenv.install("--no-deps", "--no-compile", str(wheels() / Path(wheel).name))
    small = forget_cuda(virtualenv.site_packages)
    if small:
        virtualenv.install("--no-compile", *small)
    write_stubs(virtualenv.site_packages)
    # Those of constraints.txt but for torch, which is there.
    pins = [] if combination.dependencies == NEWEST else (ROOT / PINNED).read_text().splitlines()
    file = virtualenv.site_packages / "constraints.txt"
    file.write_text("\n".join(line for line in pins if not line.startswith("torch==")))
    virtualenv.install("--constraint", str(file), "--editable", ".[examples]", "--group", "dev")
    if combination.dependencies == LOWEST:
        # Without the requirements of frameworks for tests, some of which are newer.
        bounds = [f"{name}=={version}.*" for name, version in lower_bounds().items() if name != "torch"]
        virtualenv.install("--no-deps", *bounds)


def wheels() -> Path:
    folder = CACHE / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def free_gigabytes() -> float:
    return shutil.disk_usage(wheels()).free / 1e9


def check(combination: Combination, *, tests: list[str], keep: bool) -> None:
    """Make the environment, run the tests in it, and enter the result."""
    found = interpreter(combination.python)
    if found is None:
        combination.skipped_because = "there is no such interpreter"
        return
    if (free := free_gigabytes()) < NEEDED:
        combination.skipped_because = f"{free:.0f} GB of disk are free, {NEEDED} GB needed"
        return
    folder = CACHE / f"python{combination.python}-torch{combination.torch}"
    started = time.monotonic()
    try:
        virtualenv = Virtualenv(folder, interpreter=found)
        install(virtualenv, combination)
        print(f"{folder.name}: installed in {time.monotonic() - started:.0f} s", flush=True)
        run_tests(combination, virtualenv, tests)
    except (CommandError, subprocess.TimeoutExpired) as error:
        combination.failures.append(f"could not run: {error}")
    finally:
        combination.seconds = time.monotonic() - started
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def run_tests(combination: Combination, virtualenv: Virtualenv, tests: list[str]) -> None:
    """Run pytest, whose output goes to a file beside the environments."""
    version = "import torch, platform; print(platform.python_version(), torch.__version__)"
    combination.python, combination.torch = run([virtualenv.python, "-c", version]).split()[-2:]
    name = f"python{combination.python}-torch{combination.torch}"
    log, results = CACHE / f"{name}.log", CACHE / f"{name}.xml"
    results.unlink(missing_ok=True)
    command = [virtualenv.python, "-m", "pytest", *IN_PYTEST, f"--junit-xml={results}", *tests]
    with log.open("w") as output:
        ended = subprocess.run(
            command, cwd=ROOT, env=environ(), stdout=output, stderr=subprocess.STDOUT, timeout=7200, check=False
        )
    print(f"{name}: status {ended.returncode}, {log.relative_to(ROOT)}", flush=True)
    if not results.exists():
        raise CommandError(f"pytest wrote no results: {log.read_text()[-2000:]}")
    read_results(combination, results)
    if ended.returncode != 0 and not combination.failures:
        combination.failures = [f"pytest ended with status {ended.returncode}"]


def read_results(combination: Combination, results: Path) -> None:
    """Enter the numbers of tests, and each failure with the first line of its message."""
    tests = tests_of(results)
    outcomes = [test.outcome for test in tests]
    for test in tests:
        if test.outcome in {"failure", "error"}:
            line = test.message.strip().splitlines() or [""]
            combination.failures.append(f"{test.name}: {line[0][:160]}")
    combination.passed, combination.skipped = outcomes.count("passed"), outcomes.count("skipped")


def report(done: list[Combination]) -> None:
    """Print a line for each combination, and its failures."""
    print(f"\n{'Python':<8}  {'torch':<14}  {'dependencies':<15}  {'seconds':>7}  tests")
    for one in done:
        print(f"{one.python:<8}  {one.torch:<14}  {one.dependencies:<15}  {one.seconds:>7.0f}  {one.result}")
        for failure in one.failures:
            print(f"    {failure}")


def with_results(page: str, lane: str, done: list[Combination], date: str) -> str:
    """Return the text of the page with these results in the place of those of the same lane."""
    before, header, after = page.partition(HEADER + RULE)
    if not header:
        raise CommandError(f"{PAGE.relative_to(ROOT)} has no table of results")
    rows, rest = re.fullmatch(r"((?:\|[^\n]*\n)*)(.*)", after, re.DOTALL).groups()  # type: ignore[union-attr]  # it always matches
    kept = "".join(row for row in rows.splitlines(keepends=True) if not row.startswith(f"| {lane} |"))
    return before + header + kept + "".join(row_of(lane, one, date) for one in done) + rest


def row_of(lane: str, one: Combination, date: str) -> str:
    numbers = (one.passed, len(one.failures), one.skipped, round(one.seconds / 60))
    cells = (lane, one.python, one.torch, one.dependencies, *numbers, one.skipped_because or date)
    return f"| {' | '.join(map(str, cells))} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.compat", description=__doc__)
    parser.add_argument("--python", metavar="3.X", help="this Python only")
    parser.add_argument("--torch", metavar="VERSION", help="this torch, or 'newest'")
    parser.add_argument("--slow", action="store_true", help="all tests, not the fast lane alone")
    parser.add_argument("--tests", default="", help="files and options for pytest, in place of a lane")
    parser.add_argument("--keep", action="store_true", help="do not remove the virtual environments")
    given = parser.parse_args()
    chosen = combinations()
    if is_partial := bool(given.python or given.torch or given.tests):
        usual = {one.python: one for one in chosen}.get(given.python or own_python())
        torch = given.torch or (usual.torch if usual else NEWEST)
        dependencies = usual.dependencies if usual and torch == usual.torch else PINNED
        if given.python or given.torch:
            chosen = [Combination(python=given.python or own_python(), torch=torch, dependencies=dependencies)]
    lane = [] if given.slow else list(FAST)
    for combination in chosen:
        check(combination, tests=given.tests.split() or lane, keep=given.keep)
    report(chosen)
    if not is_partial:
        today = dt.datetime.now(tz=dt.UTC).date().isoformat()
        PAGE.write_text(with_results(PAGE.read_text(), "all" if given.slow else "fast", chosen, today))
    if any(one.failures for one in chosen):
        sys.exit(1)


if __name__ == "__main__":
    main()
