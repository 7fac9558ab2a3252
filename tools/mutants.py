"""Seeded faults: whether the tests of a room notice each of them. `tools/faults.py` is their table.

python -m tools.mutants                               # all faults, one after the other
python -m tools.mutants 'page-*' --jobs 2             # those of these names
python -m tools.mutants --save after.json             # and write which test kills each; other faults in it stay
python -m tools.mutants --compare tests/data/mutants.json after.json  # the kills that are lost
python -m tools.mutants --check                       # only whether each fault can be applied, and has its tests
python -m tools.mutants --baseline                    # the tests of the faults, with the package as it is
python -m tools.mutants --list

A fault is put into a copy of the package, which the tests import in a virtual environment of its own, with the packages
of this one. It is killed if a test fails, or if the tests have not ended at its time limit.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from rankwise._launch.reaper import become_subreaper, kill_descendants
from tools.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rankwise"
SURVIVED = "survived"
UNUSABLE = "does not apply: "
BY_TIME_LIMIT = " (time limit)"
# Lines of pytest: a test and its result, which is missing while it runs; and in the summary, an error outside of tests.
_TEST = re.compile(r"^(\S+\.py::.+?)(?: (PASSED|SKIPPED|FAILED|ERROR|XFAIL|XPASS)(?: \(.*\))?)? *$", re.MULTILINE)
_ERROR = re.compile(r"^ERROR (.+?)(?: - .*)?$", re.MULTILINE)
# Exit statuses of pytest: there is no such test, or none that runs here.
_NO_TESTS = (4, 5)


@dataclass(frozen=True, slots=True)
class Result:
    """The end of the tests of one fault.

    Attributes:
        name: The name of the fault.
        killer: The test that noticed it, `SURVIVED`, or `UNUSABLE` and why.
        seconds: How long the tests took.
        output: Their output.
    """

    name: str
    killer: str
    seconds: float
    output: str = ""

    @property
    def is_killed(self) -> bool:
        return is_kill(self.killer)


def is_kill(killer: str) -> bool:
    """Return whether this is a test, and not why there is none."""
    return killer != SURVIVED and not killer.startswith(UNUSABLE)


def problem(fault: Fault) -> str:
    """Return why a fault cannot be used with the package and the tests as they are; "" if it can."""
    path = PACKAGE / fault.file
    if not path.is_file():
        return f"there is no src/rankwise/{fault.file}"
    source = path.read_text()
    if (count := source.count(fault.text)) != 1:
        return f"src/rankwise/{fault.file} has its text {count} times"
    try:
        compile(source.replace(fault.text, fault.replacement), fault.file, "exec")
    except SyntaxError as error:
        return f"src/rankwise/{fault.file} has a syntax error with it: {error}"
    return next(filter(None, map(_missing_test, fault.tests)), "") if fault.tests else "it has no tests"


def _missing_test(test: str) -> str:
    """Return which test is not there; "" if it is."""
    file, _, name = test.partition("::")
    if not (ROOT / file).is_file():
        return f"there is no {file}"
    function = name.partition("[")[0]
    if name and not re.search(rf"^def {re.escape(function)}\(", (ROOT / file).read_text(), re.MULTILINE):
        return f"{file} has no {function}"
    return ""


def run(fault: Fault, *, is_applied: bool = True, patience: float = 1) -> Result:
    """Run the tests of a fault, with the package as it is unless it is applied, and its time limit `patience` times."""
    start = time.monotonic()
    if why := problem(fault):
        return Result(fault.name, UNUSABLE + why, 0.0)
    with tempfile.TemporaryDirectory(prefix="rankwise-mutant-") as folder:
        python = _environment(Path(folder))
        if is_applied:
            path = Path(folder) / "src" / "rankwise" / fault.file
            path.write_text(path.read_text().replace(fault.text, fault.replacement))
        status, output = _run_tests(python, fault.tests, fault.limit * patience)
    return Result(fault.name, killer(status, output), time.monotonic() - start, output)


def lost_kills(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return the faults that a test killed before and none kills any more, with what they do now."""
    found = {name: after.get(name, "is not in the table") for name, killer in before.items() if is_kill(killer)}
    return {name: killer for name, killer in found.items() if name not in after or not is_kill(killer)}


def _environment(folder: Path) -> str:
    """Return the interpreter of a new virtual environment: with a copy of the package before the packages of this one.

    With PYTHONPATH, ranks that a test starts without this variable would import the original.
    """
    shutil.copytree(PACKAGE, folder / "src" / "rankwise")
    own, there = Path(sys.executable).parent, folder / "bin"
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    there.mkdir()
    (packages / "copy.pth").write_text(
        f"{folder / 'src'}\nimport site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
    for path in own.iterdir():
        if path.is_symlink() or path.is_dir():
            (there / path.name).symlink_to(path.resolve() if path.is_dir() else os.path.realpath(path))
            continue
        content = path.read_bytes()
        if content.startswith(b"#!") and bytes(own) in content.partition(b"\n")[0]:  # a command of a package
            (there / path.name).write_bytes(content.replace(bytes(own), bytes(there), 1))
            (there / path.name).chmod(0o755)
        else:
            (there / path.name).symlink_to(path)
    return str(there / "python")


def _run_tests(python: str, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Return the exit status of the tests, None if they were ended at the time limit, and their output."""
    command = [
        python,
        "-m",
        "pytest",
        "-x",
        "-v",
        "--tb=short",
        "-rE",
        "-o",
        "console_output_style=classic",
        "-p",
        "no:cacheprovider",
        "--color=no",
        "-m",
        "not rare",  # a fault that CI does not notice is not noticed
        *tests,
    ]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        status: int | None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_descendants()  # all that the tests have started, too: this process adopts it
            process.wait()
        output.seek(0)
        return status, output.read()


def killer(status: int | None, output: str) -> str:
    """Return the test that has failed or was ended, or why there is none, from the exit status and output of pytest."""
    if status == 0:
        return SURVIVED
    tests = _TEST.findall(output)
    failed = [test for test, outcome in tests if outcome in {"FAILED", "ERROR"}] or _ERROR.findall(output)
    if failed:
        return str(failed[0])
    if status is None:
        return (tests[-1][0] if tests else "pytest") + BY_TIME_LIMIT
    last = next(reversed(output.strip().splitlines()), "")
    if status in _NO_TESTS:
        return UNUSABLE + last
    return f"pytest (exit status {status}): {last}"


def adopt_orphans() -> None:
    """Become the parent of processes whose own one ends, so that all that tests have started is found."""
    become_subreaper()
    signal.signal(signal.SIGTERM, _end)


def _end(*_: object) -> NoReturn:
    """End this process as Ctrl-C does, so that nothing stays behind: a signal by itself would end it at once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def _selected(patterns: Sequence[str]) -> list[Fault]:
    """Return the faults whose names match one of the patterns, all without patterns; SystemExit if one matches none."""
    for pattern in patterns:
        if not fnmatch.filter([fault.name for fault in FAULTS], pattern):
            raise SystemExit(f"no fault has the name {pattern}; --list shows them")
    return [one for one in FAULTS if not patterns or any(fnmatch.fnmatch(one.name, pattern) for pattern in patterns)]


def _print_problems(faults: Iterable[Fault]) -> int:
    problems = {fault.name: why for fault in faults if (why := problem(fault))}
    for name, why in problems.items():
        print(f"{name}: {why}")
    return 1 if problems else 0


def _print_lost(before: Path, after: Path) -> int:
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    lost = lost_kills(old, new)
    for name, now in lost.items():
        print(f"lost: {name}: {now}; it was killed by {old[name]}")
    for name in sorted(new.keys() - old.keys()):
        print(f"new: {name}: {new[name]}")
    print(f"{len(lost)} of {sum(map(is_kill, old.values()))} kills are lost")
    return 1 if lost else 0


def _save(path: Path, results: Iterable[Result]) -> None:
    """Write results into a file, in the place of those of the same faults."""
    before = json.loads(path.read_text()) if path.exists() else {}
    after = before | {result.name: result.killer for result in results}
    ordered = {fault.name: after[fault.name] for fault in FAULTS if fault.name in after}
    path.write_text(json.dumps(ordered, indent=2) + "\n")


def _run_all(faults: Sequence[Fault], arguments: argparse.Namespace) -> int:
    start = time.monotonic()
    signal.signal(signal.SIGTERM, _end)
    results = []
    width = max(len(fault.name) for fault in faults)
    run_one = partial(run, is_applied=not arguments.baseline, patience=arguments.patience)
    with multiprocessing.get_context("fork").Pool(arguments.jobs, initializer=adopt_orphans) as pool:
        for result in pool.imap(run_one, faults):
            results.append(result)
            print(f"{result.name:{width}}  {result.seconds:5.1f} s  {result.killer}", flush=True)
            if arguments.verbose or (arguments.baseline and result.is_killed):
                print(result.output)
            if arguments.save:
                _save(arguments.save, results)
    killed = sum(result.is_killed for result in results)
    print(f"{killed} of {len(results)} killed in {time.monotonic() - start:.0f} s")
    return 0 if killed == (0 if arguments.baseline else len(results)) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of faults, or patterns such as 'page-*'; all by default")
    parser.add_argument("--list", action="store_true", help="print the faults, and what each breaks")
    parser.add_argument(
        "--check", action="store_true", help="check that each can be applied and has its tests; runs none"
    )
    parser.add_argument("--baseline", action="store_true", help="run the tests with the package as it is")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many faults at a time")
    parser.add_argument(
        "--patience", type=float, default=1, metavar="N", help="factor of the time limits, for a busy machine"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results into this file, as JSON")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="print the kills that are lost"
    )
    parser.add_argument("--verbose", action="store_true", help="print the output of the tests")
    arguments = parser.parse_args()
    if arguments.compare:
        return _print_lost(*arguments.compare)
    faults = _selected(arguments.names)
    if arguments.check:
        return _print_problems(faults)
    if arguments.list:
        for fault in faults:
            print(f"{fault.name} ({fault.file}): {fault.breaks}")
        return 0
    return _run_all(faults, arguments)


if __name__ == "__main__":
    sys.exit(main())
