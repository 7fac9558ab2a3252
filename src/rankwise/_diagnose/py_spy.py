"""Stacks of any Python process, from outside, with py-spy (the extra `diagnose`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from rankwise._diagnose.stack import Stack, StackFrame

# A process that cannot be read for so long is not waited for.
_SECONDS: Final = 5.0
MISSING: Final = "py-spy is not installed: pip install py-spy"
REFUSED: Final = (
    "the kernel does not let this process read others (ptrace_scope, or a container without SYS_PTRACE): "
    "set kernel.yama.ptrace_scope=0; ranks of `rankwise launch` and of init(hang_report=...) need neither"
)


def read_stack(pid: int, *, native: bool = False) -> Stack | str:
    """Return the stack of the main thread of a process, or why it cannot be read.

    Args:
        pid: The process.
        native: Include functions of C++. The process is stopped for some milliseconds; it is not otherwise.
    """
    program = _program()
    if program is None:
        return MISSING
    if native:
        return _dump(program, pid, "--native")
    # What it reads of a running process may be inconsistent; then it reads a stopped one.
    stack = _dump(program, pid, "--nonblocking")
    return _dump(program, pid) if stack == "" else stack


def _program() -> str | None:
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def _dump(program: str, pid: int, *options: str) -> Stack | str:
    command = [program, "dump", "--json", *options, "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)  # noqa: S603 - py-spy
    except subprocess.TimeoutExpired:
        return f"py-spy did not read it within {_SECONDS:g} s"
    except OSError as error:
        return f"{program} cannot be run: {error.strerror}"
    errors = done.stderr.decode(errors="replace").strip()
    if done.returncode:
        refused = any(text in errors for text in ("ermission", "Operation not permitted", "EPERM"))
        last = errors.splitlines()[-1] if errors else f"py-spy ended with exit code {done.returncode}"
        return REFUSED if refused else "" if options == ("--nonblocking",) else last
    return _main_thread(done.stdout, pid)


def _main_thread(output: bytes, pid: int) -> Stack | str:
    try:
        threads = json.loads(output)
        main = next(
            (thread for thread in threads if thread["os_thread_id"] == pid or thread["thread_name"] == "MainThread"),
            threads[-1] if threads else None,
        )
        frames = [] if main is None else [StackFrame(f["name"], f["filename"], f["line"]) for f in main["frames"]]
    except (ValueError, KeyError, TypeError) as error:
        return f"py-spy has printed something else than stacks: {error!r}"
    return Stack(frames) if frames else "its main thread runs no Python code"
