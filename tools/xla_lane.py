"""Run the tests on XLA devices, in an environment with torch_xla of their own: `make test-xla`.

First the ordinary contract tests run in that environment, with its torch and gloo. Then those tests, and those of
`tests/xla/lane`, run with 1, 2 and 4 devices of XLA on the CPU: each number in processes of its own, each device a
rank. The environment is in `.xla/`, and is made anew when anything that it is made from has changed.

`make test-xla IGNITE=CHECKOUT` runs PyTorch-Ignite's own tests for XLA in place of them, from a checkout of its
repository, with 1 and 2 devices; `tests/xla/own_tests_of_ignite.py` puts the drop-in below them.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.xla.cpu_devices import variables
from tools.stub_libraries import forget_cuda, write_stubs
from tools.virtualenv import ROOT, Virtualenv, environ, run

FOLDER = ROOT / ".xla"
REQUIREMENTS = ROOT / "tests" / "xla" / "requirements.txt"
CONSTRAINTS = ROOT / "constraints.txt"
# What torch and torch_xla require, but for CUDA's libraries; and rankwise, whose newer torch the lane does not have.
REQUIRED = (
    *("absl-py", "filelock", "fsspec", "jinja2", "networkx", "numpy", "pyyaml", "requests", "sympy"),
    *("typing-extensions", "optree", "cloudpickle", "psutil", "click"),
)
TESTED_WITH = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "pytorch-ignite", "rich", "scikit-learn")
IN_PYTEST = ("-m", "not slow", "--dist", "worksteal")

# What torch 2.9 has not: an argument and an attribute of meshes, and a default device after set_default_device(None).
NOT_WITH_TORCH_2_9 = (
    "tests/contract/test_torch_groups.py::test_a_dimension_of_a_mesh_is_a_group",
    "tests/contract/test_torch_groups.py::test_a_mesh_of_some_ranks",
    "tests/contract/test_non_blocking.py::test_results_do_not_depend_on_the_thread[2ranks-default device]",
)

# The tests of a drop-in that run in worlds of all kinds.
OF_DROP_INS = ("tests/compat/ignite/test_ignite_collectives.py", "tests/compat/ignite/test_ignite_groups.py")

DEVICES = (1, 2, 4)
LANE_SECONDS = 3600  # for a run that hangs
OF_IGNITE = ("-m", "tpu", "-p", "no:rankwise", "-p", "no:cacheprovider", "-p", "tests.xla.own_tests_of_ignite")
# The variables that torch_xla reads, which change what runs.
OF_TORCH_XLA = ("PJRT_", "XLA_", "XRT_", "TPU_", "CPU_NUM_DEVICES")


def fingerprint() -> str:
    """Return a digest of everything that the environment is made from."""
    tools = [Path(__file__), ROOT / "tools" / "stub_libraries.py"]
    digest = hashlib.sha256(f"{sys.version} {ROOT}".encode())
    for path in [REQUIREMENTS, CONSTRAINTS, ROOT / "pyproject.toml", *tools]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def prepare(folder: Path) -> Virtualenv:
    """Return the environment in a folder, a new one if anything that it is made from has changed."""
    stamp, wanted = folder / "fingerprint", fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        return Virtualenv(folder, keep=True)
    started = time.monotonic()
    print(f"{folder.relative_to(ROOT)}: downloads 1 GB, and takes 3 GB of disk", flush=True)
    virtualenv = Virtualenv(folder)
    install(virtualenv, folder)
    stamp.write_text(wanted)
    print(f"{folder.relative_to(ROOT)}: made in {time.monotonic() - started:.0f} s", flush=True)
    return virtualenv


def install(virtualenv: Virtualenv, folder: Path) -> None:
    """Install torch and torch_xla without CUDA's libraries, and the packages that the tests need."""
    virtualenv.install("--no-deps", "--no-compile", "--requirement", str(REQUIREMENTS))
    forget_cuda(virtualenv.site_packages)
    write_stubs(virtualenv.site_packages)
    own = REQUIREMENTS.read_text().splitlines()
    names = {package(line) for line in own}
    constraints = folder / "constraints.txt"
    others = [line for line in CONSTRAINTS.read_text().splitlines() if package(line) not in names]
    constraints.write_text("\n".join([*own, *others, ""]))
    virtualenv.install("--constraint", str(constraints), *REQUIRED, *TESTED_WITH)
    virtualenv.install("--no-deps", "--editable", ".")
    run([virtualenv.python, "-c", "import torch, torch_xla; torch_xla.device()"], cwd=folder)


def package(line: str) -> str:
    """Return the package that a line like "torch-xla==2.9.0" is about."""
    return line.partition("==")[0].strip().lower().replace("_", "-")


def commands(virtualenv: Virtualenv, tests: list[str]) -> list[tuple[str, list[str], dict[str, str]]]:
    """Return the runs of the lane: title, command and environment of each."""
    clean = clean_environ()
    pytest = [virtualenv.python, "-m", "pytest", *IN_PYTEST]
    left_out = [f"--deselect={test}" for test in NOT_WITH_TORCH_2_9]
    gloo = [*pytest, "--numprocesses", "2", *left_out, *(tests or ["tests/contract"])]
    runs = [("gloo", gloo, clean)]
    for devices in DEVICES:
        # In a worker of pytest-xdist: torch_xla aborts the process where a rank does not come to a collective.
        command = [*pytest, "--numprocesses", "1", "-p", "no:rankwise", "-p", "tests.xla.device_ranks"]
        paths = tests or ["tests/contract", "tests/xla/lane", *OF_DROP_INS]
        runs.append((f"{devices} devices", [*command, *paths], clean | variables(devices)))
    return runs


def commands_of_ignite(virtualenv: Virtualenv, checkout: Path) -> list[tuple[str, list[str], dict[str, str]]]:
    """Return the runs of Ignite's own tests: title, command and environment of each."""
    runs = []
    for devices in DEVICES[:2]:
        environment = clean_environ() | variables(devices) | {"IGNITE_CHECKOUT": str(checkout)}
        # `python -m pytest` would put Ignite's package `tests` before ours.
        environment |= {"PYTHONPATH": f"{ROOT}:{checkout}", "PYTHONDONTWRITEBYTECODE": "1"}
        if devices > 1:
            environment["NUM_TPU_WORKERS"] = str(devices)  # by which these tests run in several ranks
        command = [str(virtualenv.bin / "pytest"), *OF_IGNITE, "-rfxX", "--timeout", "200"]
        runs.append((f"{devices} devices", [*command, str(checkout / "tests" / "ignite" / "distributed")], environment))
    return runs


def clean_environ() -> dict[str, str]:
    """Return the environment of this process without variables that change what runs."""
    return {name: value for name, value in environ().items() if not name.startswith(OF_TORCH_XLA)}


def run_all(runs: list[tuple[str, list[str], Mapping[str, str]]]) -> list[str]:
    """Run pytest for each, and return the titles of those that failed."""
    failed = []
    for title, command, environment in runs:
        print(f"--- {title}: {' '.join(command[1:])}", flush=True)
        started = time.monotonic()
        try:
            ended = subprocess.run(command, cwd=ROOT, env=environment, timeout=LANE_SECONDS, check=False)
            outcome = f"status {ended.returncode}"
        except subprocess.TimeoutExpired:
            outcome = "ended by the time limit"
        print(f"--- {title}: {outcome} after {time.monotonic() - started:.0f} s", flush=True)
        if outcome != "status 0":
            failed.append(title)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.xla_lane", description=__doc__)
    parser.add_argument("--tests", default="", help="files and options for pytest, in place of the whole lane")
    parser.add_argument("--only", default="", metavar="RUN", help='one run: "gloo", "1 devices", "2 devices"')
    parser.add_argument("--ignite", type=Path, metavar="CHECKOUT", help="run the tests of this checkout of Ignite")
    given = parser.parse_args()
    virtualenv = prepare(FOLDER / "environment")
    if given.ignite is None:
        runs = commands(virtualenv, given.tests.split())
    else:
        runs = commands_of_ignite(virtualenv, given.ignite.resolve())
    failed = run_all([one for one in runs if given.only in {"", one[0]}])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
