"""What `rankwise logs` shows: the lines of ranks in files that may still grow."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from rankwise._launch.output.log_files import LATEST, LOG_NAMES, has_ended
from rankwise.cli.printing import echo
from rankwise.errors import InvalidArgumentError

FOLLOW_SECONDS: Final = 0.5
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d ")
_ATTEMPT: Final = "attempt_"


@dataclass(slots=True)
class LogReader:
    """The files of ranks, and how far each was read.

    Attributes:
        rank: The rank whose lines are shown; None for all.
        read: The position in each file.
    """

    rank: int | None
    read: dict[Path, int] = field(default_factory=dict)

    def show(self, files: Mapping[int, Sequence[Path]], *, last: bool) -> None:
        """Show the lines that were added to the files of ranks, those of standard output and standard error.

        Lines that begin with times are shown in their order; other lines rank by rank.

        Args:
            files: The two files of each rank.
            last: Nothing more is added: the last line may have no end.
        """
        lines: list[tuple[str, int, str, TextIO]] = []
        for rank, paths in files.items():
            for path, stream in zip(paths, (sys.stdout, sys.stderr), strict=True):
                if self.rank in {None, rank}:
                    begun = ""
                    for line in self._lines(path, last=last):
                        begun = found[0] if (found := _TIME.match(line)) else begun
                        lines.append((begun, rank, line, stream))
        for _, rank, line, stream in sorted(lines, key=lambda each: each[0]):
            echo(f"[{rank}] {line}", file=stream)

    def check_rank(self, known: Iterable[int], what: str) -> None:
        """Check that a rank has files.

        Raises:
            InvalidArgumentError: It has none.
        """
        known = list(known)
        if self.rank is not None and self.rank not in known:
            names = ", ".join(map(str, known)) or "none has started"
            raise InvalidArgumentError(f"{what} has no output of rank {self.rank}; those with output: {names}")

    def _lines(self, path: Path, *, last: bool) -> list[str]:
        start = self.read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return []
        end = len(data) if last else data.rfind(b"\n") + 1
        self.read[path] = start + end
        return data[:end].decode(errors="replace").splitlines()


def launch_folder(name: str) -> Path | None:
    """Return the folder of a launch: the folder of this name, or the newest one of those in it; None if there is none.

    Args:
        name: What `--log-dir` was, or the folder of one launch below it.
    """
    folder = Path(name)
    if any(folder.glob(f"{_ATTEMPT}*")):
        return folder
    latest = folder / LATEST
    return latest.resolve() if latest.is_dir() else None


def show_launch(folder: Path, rank: int | None, *, follow: bool) -> None:
    """Show the last attempt of a launch on this host; with `follow` until the launch has ended.

    Raises:
        InvalidArgumentError: The rank has no files.
    """
    reader = LogReader(rank)
    shown: Path | None = None
    while True:
        is_last = not follow or has_ended(folder)
        attempts = sorted(folder.glob(f"{_ATTEMPT}*"), key=lambda path: int(path.name.removeprefix(_ATTEMPT)))
        for attempt in attempts[-1:] if shown is None else attempts[attempts.index(shown) :]:
            if shown not in {None, attempt}:
                echo(f"rankwise: {attempt.name.replace('_', ' ')} begins", file=sys.stderr)
            shown = attempt
            ranks = sorted(int(path.name) for path in attempt.iterdir() if path.name.isdecimal())
            files = {each: [attempt / str(each) / name for name in LOG_NAMES.values()] for each in ranks}
            if is_last:
                reader.check_rank(files, str(attempt))
            reader.show(files, last=is_last or attempt != attempts[-1])
        if is_last:
            return
        time.sleep(FOLLOW_SECONDS)
