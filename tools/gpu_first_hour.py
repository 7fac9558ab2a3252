"""What an accelerator shows of rankwise, as a table of Markdown: python -m tools.gpu_first_hour [--output FILE].

Runs the tests marked `gpu`, and then each check of `tools.gpu_checks` for which there are devices enough. It takes some
minutes on one or two devices. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tools.gpu_checks import CHECKS, Check

ROOT = Path(__file__).parents[1]
LONGEST_OUTPUT = 4000


def run_check(check: Check, devices: int, folder: Path) -> list[str]:
    """Run a check, and return its row: question, verdict, what it measured, seconds."""
    if check.devices > devices:
        return [check.question, f"not seen: needs {check.devices} devices", "", ""]
    program = folder / "check.py"
    program.write_text(check.program)
    launch = [sys.executable, "-m", "rankwise", "launch", "-n", str(check.ranks), "--"]
    command = [*(launch if check.ranks else [sys.executable]), str(program)]
    start = time.monotonic()
    try:
        ended = subprocess.run(
            command, env={**os.environ, **check.environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=check.limit, check=False,
        )  # fmt: skip
        output, verdict = ended.stdout, ""
    except subprocess.TimeoutExpired as error:
        output, verdict = (error.stdout or b"").decode(errors="replace"), f"not over after {check.limit:g} s"
    # Without the ranks before the lines.
    output = "\n" + "\n".join(line.removeprefix("[0] ").removeprefix("[1] ") for line in output.splitlines())
    lines = output.splitlines()
    unseen = next((line for line in lines if line.startswith("not seen: ")), "")
    missing = [text for text in check.expected if text not in output]
    if unseen:
        return [check.question, unseen, "", ""]
    if missing and not verdict:
        verdict = f"FAILED: no {missing[0].strip()!r} in the output"
    if verdict:
        print(f"--- {check.question}\n{output[-LONGEST_OUTPUT:]}", file=sys.stderr)
    values = [line.partition("measured: ")[2] for line in lines if line.startswith("measured: ")]
    return [check.question, verdict or "passed", "; ".join(values), f"{time.monotonic() - start:.0f}"]


def run_tests() -> list[str]:
    """Run the tests marked `gpu`, and return their row."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    start = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stdout[-LONGEST_OUTPUT:], file=sys.stderr)
    verdict = "FAILED" if ended.returncode else "passed"
    return ["tests/gpu", verdict, ended.stdout.strip().splitlines()[-1], f"{time.monotonic() - start:.0f}"]


def device_names() -> str:
    """Return the number of the devices, and their names where torch has them."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return "no device"
    module = torch.get_device_module(accelerator)
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else accelerator.type
    return f"{torch.accelerator.device_count()} x {name}"


def main() -> int:
    """Run all, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="the file of the table; standard output by default")
    arguments = parser.parse_args()
    devices = torch.accelerator.device_count()
    if not devices:
        print("torch sees no accelerator", file=sys.stderr)
        return 2
    rows = [["check", "verdict", "measured", "seconds"], ["---"] * 4, run_tests()]
    with tempfile.TemporaryDirectory() as folder:
        for check in CHECKS:
            rows.append(run_check(check, devices, Path(folder)))
            print(f"{rows[-1][1]}: {check.question}", file=sys.stderr)
    heading = (
        f"{device_names()}, torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )
    table = "\n".join([heading, "", *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
    if arguments.output is None:
        print(table)
    else:
        arguments.output.write_text(table)
    return int(any(row[1].startswith(("FAILED", "not over")) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
