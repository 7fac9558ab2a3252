"""Run the fast lane of the tests with other versions of Python and torch: `make compat`.

Without arguments: the oldest Python of pyproject.toml with the oldest torch that it allows, the newest Python with the
newest torch of the registry, and the Pythons in between with the torch of constraints.txt. The Python that runs this
file is left out there: `make test` has it. Each combination has a virtual environment of its own in `.compat/`, which
is removed after its run. A combination is skipped, with the reason, if its interpreter is missing or the disk has too
little room.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tools.results import tests_of
from tools.virtualenv import ROOT, CommandError, Virtualenv, environ

CACHE = ROOT / ".compat"
LANE = ["-m", "not slow", "--numprocesses", "2", "--dist", "worksteal"]

# What an environment takes at most, and pip's cache of it, in GB. A CUDA build brings CUDA's libraries.
CPU_BUILD = 3
CUDA_BUILD = 14

NEWEST = "newest"


@dataclass(slots=True, kw_only=True)
class Combination:
    """A version of Python with a version of torch, and the result of the tests with them."""

    python: str
    torch: str
    result: str = ""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def combinations() -> list[Combination]:
    """Return the combinations that are promised, each Python once."""
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    oldest, tested = (
        re.search(r'"torch>=([\d.]+)"', project),
        re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE),
    )
    if oldest is None or tested is None:
        raise CommandError("no torch in pyproject.toml or constraints.txt")
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return [
        Combination(python=pythons[0], torch=oldest[1]),
        *(Combination(python=python, torch=tested[1]) for python in pythons[1:-1] if python != own),
        Combination(python=pythons[-1], torch=NEWEST),
    ]


def interpreter(version: str) -> str | None:
    """Return an interpreter of a version like 3.12: from PATH, if it starts, or from pyenv's folder."""
    folders = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for candidate in [shutil.which(f"python{version}"), *sorted(str(path) for path in folders)]:
        if candidate is not None:
            asked = subprocess.run([candidate, "--version"], capture_output=True, text=True, timeout=60, check=False)
            if asked.stdout.startswith(f"Python {version}."):
                return candidate
    return None


def offered_version(python: str, torch: str) -> str:
    """Return the version of torch that pip would install there: the CPU build, where there is one.

    From the registry's list of versions: `pip install --dry-run` downloads gigabytes with pip's older versions.
    """
    command = [python, "-m", "pip", "index", "versions", "torch"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environ())
    listed = re.search(r"Available versions: (.+)", asked.stdout)
    if listed is None:
        raise CommandError(f"pip lists no versions of torch: {asked.stderr.strip()}")
    versions = listed[1].split(", ")
    release = versions[0].partition("+")[0] if torch == NEWEST else torch + ".0" * (2 - torch.count("."))
    for version in (f"{release}+cpu", release):
        if version in versions:
            return version
    raise CommandError(f"the registry has no torch {release} for this Python")


def free_gigabytes() -> float:
    CACHE.mkdir(exist_ok=True)
    return shutil.disk_usage(CACHE).free / 1e9


def check(combination: Combination, *, tests: list[str], keep: bool) -> None:
    """Make the environment, run the tests in it, and enter the result."""
    found = interpreter(combination.python)
    if found is None:
        combination.result = "skipped: there is no such interpreter"
        return
    folder = CACHE / f"python{combination.python}-torch{combination.torch}"
    started = time.monotonic()
    try:
        virtualenv = Virtualenv(folder, interpreter=found)
        combination.torch = offered_version(virtualenv.python, combination.torch)
        needed, free = CPU_BUILD if combination.torch.endswith("+cpu") else CUDA_BUILD, free_gigabytes()
        print(f"{folder.name}: needs up to {needed} GB, {free:.0f} GB are free", flush=True)
        if free < needed:
            combination.result = f"skipped: {free:.0f} GB free, {needed} GB needed"
            return
        virtualenv.install("pip>=25.1")  # which knows dependency groups
        virtualenv.install(f"torch=={combination.torch}", "--editable", ".[examples]", "--group", "dev")
        run_tests(combination, virtualenv, tests)
    except (CommandError, subprocess.TimeoutExpired) as error:
        combination.result = "could not run"
        combination.failures = [str(error)]
    finally:
        combination.seconds = time.monotonic() - started
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def run_tests(combination: Combination, virtualenv: Virtualenv, tests: list[str]) -> None:
    """Run pytest, whose output goes to a file beside the environments."""
    version = "import torch, platform; print(platform.python_version(), torch.__version__)"
    asked = subprocess.run([virtualenv.python, "-c", version], capture_output=True, text=True, timeout=300, check=True)
    combination.python, combination.torch = asked.stdout.split()
    name = f"python{combination.python}-torch{combination.torch}"
    log, results = CACHE / f"{name}.log", CACHE / f"{name}.xml"
    command = [virtualenv.python, "-m", "pytest", *LANE, f"--junit-xml={results}", *tests]
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
    passed, skipped = outcomes.count("passed"), outcomes.count("skipped")
    combination.result = f"{passed} passed, {len(combination.failures)} failed, {skipped} skipped"


def report(done: list[Combination]) -> None:
    """Print a line for each combination, and its failures."""
    print(f"\n{'Python':<8}  {'torch':<14}  {'seconds':>7}  tests")
    for one in done:
        print(f"{one.python:<8}  {one.torch:<14}  {one.seconds:>7.0f}  {one.result}")
        for failure in one.failures:
            print(f"    {failure}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.compat", description=__doc__)
    parser.add_argument("--python", metavar="3.X", help="this Python only")
    parser.add_argument("--torch", metavar="VERSION", help="this torch, or 'newest'")
    parser.add_argument("--tests", default="", help="files and options for pytest, in place of the whole fast lane")
    parser.add_argument("--keep", action="store_true", help="do not remove the virtual environments")
    given = parser.parse_args()
    chosen = combinations()
    if given.python or given.torch:
        python = given.python or f"{sys.version_info[0]}.{sys.version_info[1]}"
        usual = next((one.torch for one in chosen if one.python == python), NEWEST)
        chosen = [Combination(python=python, torch=given.torch or usual)]
    print(f"{free_gigabytes():.0f} GB of disk are free", flush=True)
    for combination in chosen:
        check(combination, tests=given.tests.split(), keep=given.keep)
    report(chosen)
    if any(one.failures for one in chosen):
        sys.exit(1)


if __name__ == "__main__":
    main()
