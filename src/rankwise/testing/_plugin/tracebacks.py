"""The stacks of ranks: where each rank is, with the ranks of one location together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rankwise._diagnose.stack import FRAME, WRAPPERS, called_function
from rankwise._text import ranks_text

_RUNNING_TESTS: Final = ("/_pytest/", "/pluggy/", "/rankwise/testing/", "/rankwise/_launch/")


def summary(stacks: Mapping[int, str], file: str) -> str:
    """Return the locations of ranks in a test's file: "ranks 0, 2 in all_reduce, test_x.py:12; rank 1 in ..."."""
    return "; ".join(f"{ranks_text(ranks)} {location}" for location, ranks in _by_location(stacks, file).items())


def grouped(stacks: Mapping[int, str], file: str) -> list[tuple[str, str]]:
    """Return one stack for each location, with a title that names the ranks there."""
    return [
        (f"stack of {ranks_text(ranks)}, {location}", trimmed(stacks[ranks[0]]))
        for location, ranks in _by_location(stacks, file).items()
    ]


def interrupt_in(file: str, stacks: Mapping[int, str]) -> None:
    """Raise KeyboardInterrupt with the line of a file where a rank is; return if no rank is in that file.

    Pytest reports the interrupted line, which would be the one where its own process waits for the ranks.
    """
    for stack in stacks.values():
        line = next((int(frame["line"]) for frame in _frames(stack) if frame["file"] == file), 0)
        if line:
            exec(compile("\n" * (line - 1) + "raise KeyboardInterrupt", file, "exec"), {})  # noqa: S102 - only compiled code can have that line


def trimmed(stack: str) -> str:
    """Return a stack without the frames of pytest and rankwise that run the test."""
    lines: list[str] = []
    below = False
    for line in stack.rstrip().splitlines():
        frame = FRAME.match(line)
        below = frame is not None and (below or any(part in frame["file"] for part in _RUNNING_TESTS))
        if not below:
            lines.append(line)
    return "\n".join(lines)


def _by_location(stacks: Mapping[int, str], file: str) -> dict[str, list[int]]:
    locations: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        locations.setdefault(_location(stacks[rank], file), []).append(rank)
    return locations


def _frames(stack: str) -> list[dict[str, str]]:
    """Return the frames of the main thread, which comes last, its innermost frame first."""
    return [match.groupdict() for match in FRAME.finditer(stack.rpartition("hread 0x")[2])]


def _location(stack: str, file: str) -> str:
    frames = _frames(stack)
    for index, frame in enumerate(frames):
        if frame["file"] == file:
            above = [inner["function"] for inner in frames[:index] if inner["function"] not in WRAPPERS]
            called = above[-1] if above else called_function(file, int(frame["line"])) or frame["function"]
            return f"in {called}, {Path(file).name}:{frame['line']}"
    if frames:
        return f"in {frames[0]['function']}, {Path(frames[0]['file']).name}:{frames[0]['line']}"
    return "without a stack"
