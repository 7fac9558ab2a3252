"""What the stacks of ranks say: where each of them is, those in the same place together."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rankwise._text import ranks_text

_RUNNING_TESTS: Final = ("/_pytest/", "/pluggy/", "/rankwise/testing/", "/rankwise/launch/")
# What decorators call the function that they return.
_WRAPPERS: Final = frozenset({"wrapper", "wrapped", "inner", "decorated"})
_FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


def summary(stacks: Mapping[int, str], file: str) -> str:
    """Return where ranks are in a test's file: "ranks 0, 2 in all_reduce, test_x.py:12; rank 1 in sleep, ..."."""
    return "; ".join(f"{ranks_text(ranks)} {place}" for place, ranks in _together(stacks, file).items())


def grouped(stacks: Mapping[int, str], file: str) -> list[tuple[str, str]]:
    """Return stacks, each with a title that names the ranks in that place; one stands for all of them."""
    return [
        (f"stack of {ranks_text(ranks)}, {place}", trimmed(stacks[ranks[0]]))
        for place, ranks in _together(stacks, file).items()
    ]


def interrupt_in(file: str, stacks: Mapping[int, str]) -> None:
    """Raise KeyboardInterrupt as if that had come in a file, on the line where a rank is; return if none is there.

    Pytest names the line that was interrupted, and that is where its own process waits for the ranks.
    """
    for stack in stacks.values():
        line = next((int(frame["line"]) for frame in _frames(stack) if frame["file"] == file), 0)
        if line:
            exec(compile("\n" * (line - 1) + "raise KeyboardInterrupt", file, "exec"), {})  # noqa: S102 - for its line


def trimmed(stack: str) -> str:
    """Return a stack without what runs the test, below it."""
    lines: list[str] = []
    below = False
    for line in stack.rstrip().splitlines():
        frame = _FRAME.match(line)
        below = frame is not None and (below or any(part in frame["file"] for part in _RUNNING_TESTS))
        if not below:
            lines.append(line)
    return "\n".join(lines)


def _together(stacks: Mapping[int, str], file: str) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        places.setdefault(_place(stacks[rank], file), []).append(rank)
    return places


def _frames(stack: str) -> list[dict[str, str]]:
    """Return the frames of the main thread, which comes last, its innermost frame first."""
    return [match.groupdict() for match in _FRAME.finditer(stack.rpartition("hread 0x")[2])]


def _place(stack: str, file: str) -> str:
    frames = _frames(stack)
    for index, frame in enumerate(frames):
        if frame["file"] == file:
            above = [inner["function"] for inner in frames[:index] if inner["function"] not in _WRAPPERS]
            called = above[-1] if above else _called(file, int(frame["line"])) or frame["function"]
            return f"in {called}, {Path(file).name}:{frame['line']}"
    if frames:
        return f"in {frames[0]['function']}, {Path(frames[0]['file']).name}:{frames[0]['line']}"
    return "without a stack"


def _called(file: str, line: int) -> str:
    """Return the function that a line calls, if it is one: it is written in C, and has no frame."""
    try:
        tree = ast.parse(linecache.getline(file, line).strip().rstrip(":"))
    except SyntaxError:
        return ""
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    return called.pop() if len(called) == 1 else ""
