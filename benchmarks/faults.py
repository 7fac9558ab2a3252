"""What becomes of a world when one of its ranks has a fault: beside torchrun, how long until its last process is gone.

python benchmarks/faults.py
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

# A world that is not gone by then does not end by itself.
LIMIT_SECONDS = 45.0
MARK = "FAULTS_BENCHMARK"
BIN = Path(sys.executable).parent
PROGRAM = str(Path(__file__).parent / "programs" / "fault.py")
LAUNCHERS = {
    "rankwise": [str(BIN / "rankwise"), "launch", "-n", "2", PROGRAM],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", PROGRAM],
}
KINDS = (
    "raise", "raise from another", "exit 3", "exit None, early", "os._exit(1)", "SIGKILL", "SIGSEGV", "SIGABRT",
    "out of memory", "10 MB exception", "exception that does not travel", "disk full", "stdout closed", "import error",
    "syntax error", "death before joining", "death while joining", "others blocked in C++", "others ignore SIGTERM",
    "a child holds the output", "launcher killed", "launcher terminated", "Ctrl-C",
)  # fmt: skip


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def seconds(command: list[str], kind: str, folder: Path) -> tuple[float | None, int, list[str]]:
    """Return the seconds from the fault to the end of the last process, the exit status, and the lines on stderr."""
    mark = uuid.uuid4().hex
    moment = folder / mark
    with (folder / "stderr").open("w+", errors="replace") as stderr:
        launcher = subprocess.Popen(
            [*command, kind, str(moment)],
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
            stdout=subprocess.DEVNULL, stderr=stderr, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        moment.with_suffix(".pid").write_text(str(launcher.pid))
        deadline = time.time() + LIMIT_SECONDS + 15
        left = [psutil.Process(launcher.pid)]
        while (left or not moment.exists()) and time.time() < deadline:
            launcher.poll()
            left = marked(mark)
            if moment.exists() and time.time() - float(moment.read_text() or "inf") > LIMIT_SECONDS:
                break
            time.sleep(0.02)
        end = time.time()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        launcher.wait()
        stderr.seek(0)
        lines = stderr.read().splitlines()
    return None if left else end - float(moment.read_text()), launcher.returncode, lines


def main() -> None:
    print("| fault | rankwise | torchrun | ratio | lines on stderr | by torchrun | statuses |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in sys.argv[1:] or KINDS:
        took, codes, lines = {}, {}, {}
        for name, command in LAUNCHERS.items():
            with tempfile.TemporaryDirectory() as folder:
                took[name], codes[name], lines[name] = seconds(command, kind, Path(folder))
        shown = {
            name: f"over {LIMIT_SECONDS:.0f} s" if time is None else f"{time:.2f} s" for name, time in took.items()
        }
        ours, theirs = took["rankwise"], took["torchrun"] or LIMIT_SECONDS
        ratio = "" if ours is None else f"{ours / theirs:.2f}"
        print(
            f"| {kind} | {shown['rankwise']} | {shown['torchrun']} | {ratio} | {len(lines['rankwise'])} "
            f"| {len(lines['torchrun'])} | {codes['rankwise']}, {codes['torchrun']} |",
            flush=True,
        )
        if os.environ.get("SHOW_LINES"):
            print("\n".join(line[:160] for line in lines["rankwise"][-25:]))


if __name__ == "__main__":
    main()
