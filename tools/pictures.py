"""The pictures in docs/pictures: terminals in which the commands have really run, as SVG.

    python -m tools.pictures               # all
    python -m tools.pictures failure env   # some

Each command runs on a terminal of its own. What is on its screen at the end, or after some seconds, is the picture.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT  # where rich.console has it from
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
BIN = Path(sys.executable).parent
COLUMNS: Final = 120
ROWS: Final = 100
SECONDS: Final = 200.0
# Rich names fonts of another site. A page without a network shows those of the reader's.
FORMAT: Final = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace"
)
# Only what is below them is shown.
PATHS_OF_THIS_MACHINE: Final = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(BIN), str(ROOT))
COLORS: Final = {"brown": "yellow", "brightbrown": "bright_yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture.

    Attributes:
        shown: The command, as the picture shows it.
        files: Files that the command needs, copied into the folder in which it runs.
        job: A command that runs meanwhile.
        seconds: For how long the command runs before it is stopped; None until it has ended.
    """

    shown: str
    files: tuple[str, ...] = ()
    job: str = ""
    seconds: float | None = None


PICTURES: Final = {
    "demo": Picture(shown="rankwise launch -n 4 digits.py --device cpu", files=("examples/digits.py",)),
    "mismatch": Picture(shown="rankwise launch -n 4 mismatch.py", files=("docs/pictures/mismatch.py",)),
    "failure": Picture(shown="rankwise launch -n 2 fails.py", files=("docs/pictures/fails.py",)),
    "failure_torchrun": Picture(
        shown="torchrun --nproc-per-node=2 fails_torch.py", files=("docs/pictures/fails_torch.py",)
    ),
    "hang": Picture(
        shown="rankwise stacks --watch 10",
        files=("examples/broken/skips_collective.py",),
        job="torchrun --nproc-per-node 3 skips_collective.py",
    ),
    "top": Picture(
        shown="rankwise top",
        files=("examples/digits.py",),
        job="rankwise launch -n 4 digits.py --device cpu --epochs 100000",
        seconds=6,
    ),
    "env": Picture(shown="mpiexec.hydra -n 4 rankwise env --all --rich"),
    "pytest": Picture(shown="pytest -v test_metric.py", files=("docs/pictures/test_metric.py",)),
}


def environ() -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    no_other_plugins = {"PYTEST_ADDOPTS": "-p no:asyncio -p no:randomly -p no:cacheprovider --no-header"}
    more = {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    return {**os.environ, **size, **no_other_plugins, **more, "PATH": path}


def screen_of(picture: Picture, folder: Path) -> pyte.Screen:
    """Run a command on a terminal, and return what is on its screen."""
    output = b""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe("sh", ["sh", "-c", f"exec {picture.shown}"], environ())  # noqa: S606, S607 - as a user does
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    end = time.monotonic() + (picture.seconds or SECONDS)
    while select.select([terminal], [], [], max(0, end - time.monotonic()))[0]:
        try:
            output += os.read(terminal, 65536)
        except OSError:  # Linux's end of file
            break
    else:
        os.kill(process, signal.SIGKILL)
    os.close(terminal)
    os.waitpid(process, 0)
    for path in PATHS_OF_THIS_MACHINE:
        output = output.replace(f"{path}/".encode(), b"")
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.ByteStream(screen).feed(output.replace(f"{folder}/".encode(), b""))
    return screen


def text_of(picture: Picture, screen: pyte.Screen) -> Text:
    """Return what is on a screen as text with styles, below the command."""
    lines = [Text.assemble(("$ ", "bold green"), (picture.shown, "bold"))]
    for number in range(ROWS):
        line = Text()
        for column in range(COLUMNS):
            char = screen.buffer[number][column]
            color = COLORS.get(char.fg, char.fg.replace("bright", "bright_"))
            color = f"#{color}" if re.fullmatch("[0-9a-f]{6}", color) else color
            style = "" if color == "default" else color
            line.append(char.data, style=f"{style} {'bold' if char.bold else ''}".strip())
        line.rstrip()
        lines.append(line)
    while not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


@contextlib.contextmanager
def running(job: str, folder: Path) -> Iterator[None]:
    """Let a job run meanwhile, for some seconds before too."""
    if not job:
        yield
        return
    with subprocess.Popen(
        job.split(), cwd=folder, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        time.sleep(15)  # until it is where it is to be seen
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
            process.kill()


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        picture = PICTURES[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for file in picture.files:
                (folder / Path(file).name).write_text((ROOT / file).read_text())
            with running(picture.job, folder):
                screen = screen_of(picture, folder)
            text = text_of(picture, screen)
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(text, soft_wrap=True)
        path = FOLDER / f"{name}.svg"
        path.write_text(console.export_svg(title="", code_format=FORMAT, unique_id=name))
        print(f"{path.relative_to(ROOT)}: {len(text.plain.splitlines())} lines")


if __name__ == "__main__":
    main()
