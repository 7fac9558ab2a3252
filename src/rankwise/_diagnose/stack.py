"""A stack: its frames, where it is in the user's program, and whether it waits in a collective."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby, takewhile
from pathlib import Path
from typing import Final

from rankwise._user_frames import installed_folders

# The usual names of functions that decorators return.
WRAPPERS: Final = frozenset({"wrapper", "wrapped", "inner", "decorated"})
FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
# Of any interpreter: a job may run with another one than this command.
_OF_LIBRARIES: Final = re.compile(
    r"/(site|dist)-packages/|/lib/python3\.\d+/|^<|/torch/(distributed|autograd|nn)/"
    r"|/rankwise/(_\w+|cli|compat|extend|testing)/|/rankwise/(_\w+|errors|launching|topology)\.py$"
)
# Of the programs that pip has made: a few lines that call an installed package.
_CONSOLE_SCRIPT: Final = re.compile(r"/bin/[^/.]+$")
_PACKAGE_FOLDER: Final = re.compile(r"/(?:site|dist)-packages/[^/]+")
_NO_PROGRAM: Final = re.compile(r"/(torch|rankwise|ray|mpi4py|coverage|debugpy)$")
_COLLECTIVES: Final = (
    "/torch/distributed/distributed_c10d.py", "/torch/distributed/nn/", "/torch/distributed/_functional_collectives.py",
    "/rankwise/_comm/", "/rankwise/_collectives/", "/rankwise/_rendezvous/", "/torch/distributed/rendezvous.py",
)  # fmt: skip
_NATIVE_SOURCES: Final = frozenset({".c", ".cc", ".cpp", ".cxx", ".cu", ".h", ".hpp", ".S", ".rs", ".pyx"})
_LAUNCHER: Final = "/rankwise/_launch/forkserver/"  # below the user's program
_IMPORT: Final = "<frozen importlib"
_BACKWARD: Final = "/torch/autograd/graph.py"
# Frames of one of these packages that follow each other are shown in one line, if they are so many.
_FOLDED_PACKAGE: Final = re.compile(r"/(rankwise|torch)/(?!.*/(?:rankwise|torch)/)")
_FEWEST_FOLDED: Final = 3
# Functions that return when an accelerator has finished, and an optimizer, which waits where too much is queued.
_OF_DEVICE: Final = frozenset({"item", "tolist", "cpu", "numpy", "synchronize"})
_OPTIMIZERS: Final = "/torch/optim/"


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A frame: a function, its file and the line."""

    function: str
    file: str
    line: int

    @property
    def is_native(self) -> bool:
        """It is a function of C++; with a line where the library has debug information."""
        return Path(self.file).suffix in _NATIVE_SOURCES or (not self.file.endswith(".py") and not self.line)

    def __str__(self) -> str:
        if self.is_native:
            return f"  {self.function} (native)"
        return f'  File "{self.file}", line {self.line} in {self.function}'


@dataclass(frozen=True)
class Stack:
    """The frames of a main thread, the innermost first; `known_location` if its program is on another host."""

    frames: Sequence[StackFrame]
    known_location: str = ""

    @cached_property
    def user_frame(self) -> StackFrame | None:
        """The innermost frame of the user's program; else the innermost one of Python; None without any.

        An installed program, as of `python -m package` or a console script, is the package of the outermost frame.
        """
        frames = [frame for frame in self.frames if not frame.is_native]
        found = next((frame for frame in frames if not _is_library(frame.file)), None)
        if found is None or _CONSOLE_SCRIPT.search(found.file):
            packages = [match[0] for frame in frames if (match := _PACKAGE_FOLDER.search(frame.file))]
            program = next((package for package in reversed(packages) if not _NO_PROGRAM.search(package)), None)
            installed = (frame for frame in frames if program is not None and program in frame.file)
            found = next(installed, found)
        return found or (frames[0] if frames else None)

    @cached_property
    def location(self) -> str:
        """The function that the user's program calls, and the line: "all_reduce at train.py:88"."""
        frame = self.user_frame
        if self.known_location:
            return self.known_location
        if frame is None:
            return "without a stack of Python"
        inner = self.frames[: self.frames.index(frame)]
        # Some readers give qualified names, as "Module.forward".
        names = [called.function.rpartition(".")[2] for called in inner if not called.is_native]
        names = [name for name in names if name not in WRAPPERS]
        function = names[-1] if names else called_function(frame.file, frame.line) or frame.function
        return f"{function} at {Path(frame.file).name}:{frame.line}"

    @cached_property
    def importing(self) -> str:
        """The file and line of the module that is imported now: "model.py:3"; "" if none is."""
        modules = [index for index, frame in enumerate(self.frames) if frame.function == "<module>"]
        if not modules or not any(_IMPORT in frame.file for frame in self.frames[modules[0] :]):
            return ""
        frame = self.frames[modules[0]]
        return f"{Path(frame.file).name}:{frame.line}"

    @cached_property
    def in_collective(self) -> bool:
        """It is in a collective, or meets the other ranks."""
        return any(part in frame.file for frame in self.frames for part in _COLLECTIVES)

    @cached_property
    def in_backward(self) -> bool:
        """It is in a backward pass, where the gradients of DDP are reduced."""
        return any(_BACKWARD in frame.file for frame in self.frames)

    @cached_property
    def reads_device(self) -> bool:
        """It is in a function that waits for an accelerator, if the tensors are on one."""
        return self.location.partition(" at ")[0] in _OF_DEVICE or any(
            _OPTIMIZERS in frame.file for frame in self.frames
        )

    def __str__(self) -> str:
        """Return the frames, the most recent call first, several of rankwise or of torch in one line.

        With frames of C++, which a user asks for to see all, each has a line.
        """
        frames = list(takewhile(lambda frame: _LAUNCHER not in frame.file, self.frames))
        if any(frame.is_native for frame in frames):
            return "\n".join(map(str, frames))
        return "\n".join(
            _folded(package, list(group)) for package, group in groupby(frames, lambda frame: _package(frame.file))
        )


def parse_stacks(text: str) -> Stack | None:
    """Return the stack of the main thread, which comes last in the output of faulthandler; None if it is not there."""
    frames = [
        StackFrame(match["function"], match["file"], int(match["line"]))
        for match in FRAME.finditer(text.rpartition("hread 0x")[2])
    ]
    return Stack(frames) if frames else None


def _folded(package: str, frames: Sequence[StackFrame]) -> str:
    """Return a line for the frames of a package that follow each other; a line for each if they are few."""
    if not package or len(frames) < _FEWEST_FOLDED:
        return "\n".join(map(str, frames))
    inner, outer = (f"{frame.function} ({Path(frame.file).name}:{frame.line})" for frame in (frames[0], frames[-1]))
    return f"  {len(frames)} frames of {package}: {inner}, called by {outer}"


def _package(file: str) -> str:
    """Return "rankwise" or "torch" for a file of theirs, and "" for others."""
    match = _FOLDED_PACKAGE.search(file)
    return match[1] if match and _is_library(file) else ""


@cache
def _is_library(file: str) -> bool:
    return file.startswith(installed_folders()) or _OF_LIBRARIES.search(file) is not None


def called_function(file: str, line: int) -> str:
    """Return the function that a line calls: a function in C has no frame in the stack.

    Of several, it is the one that waits for an accelerator; "" if none does.
    """
    try:
        tree = ast.parse(linecache.getline(file, line).strip().rstrip(":"))
    except SyntaxError:
        return ""
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    candidates = called if len(called) == 1 else called & _OF_DEVICE
    return candidates.pop() if len(candidates) == 1 else ""
