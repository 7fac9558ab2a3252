"""The functions that a collective runs through on a rank, in order: those of rankwise, and those of torch beside it.

python -m tools.hops                      # a 16-byte all_reduce on 2 ranks
python -m tools.hops barrier --ranks 4
python -m tools.hops all_reduce --quiet   # the numbers alone
python -m tools.hops --failure            # the forms of an exception of one rank, on the way to the terminal

Counted are the Python functions that run in the calling thread and whose code is in the package, each once. Their
comprehensions are not: newer versions of Python run those in the function itself.

A form of an exception is a class, an exception or one of rankwise's, of which an object in a local variable of rankwise
has the exception's message in its own text or attributes. Pickled values are not, nor objects that only refer to one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.distributed as dist

import rankwise as rw
from rankwise.extend.collectives import collective

OPERATIONS = ("all_reduce", "all_reduce_number", "barrier", "broadcast", "all_gather")
# The first calls import modules and fill caches. Of the others the shortest counts: how often a rank looks for the
# frames of the others depends on the scheduler.
WARM_UP = 3
CALLS = 60
MESSAGE = "this batch has no data"
_FOLDERS = {"rankwise": Path(rw.__file__).parent, "torch": Path(torch.__file__).parent}
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@dataclass(frozen=True, slots=True)
class Hop:
    """A function that was called.

    Attributes:
        name: Its qualified name.
        file: Its file, in the package.
        line: Its first line.
        depth: How many functions of the package were running when it was first called.
        calls: How often it was called.
    """

    name: str
    file: str
    line: int
    depth: int
    calls: int


def calls_of(operation: str) -> dict[str, Callable[[], object]]:
    """Return a call of rankwise and the one of torch, with four floats or a small object."""
    tensor = torch.ones(4)
    objects: list[object] = [{"loss": 0.5}] * dist.get_world_size()
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all_reduce": (lambda: rw.all_reduce(tensor), lambda: dist.all_reduce(tensor)),
        "all_reduce_number": (lambda: rw.all_reduce(1.0), lambda: dist.all_reduce(tensor)),
        "barrier": (rw.barrier, dist.barrier),
        "broadcast": (lambda: rw.broadcast(objects[0]), lambda: dist.broadcast_object_list(objects)),
        "all_gather": (lambda: rw.all_gather(objects[0]), lambda: dist.all_gather_object(objects, objects[0])),
    }
    ours, torchs = calls[operation]
    return {"rankwise": ours, "torch": torchs}


def trace(call: Callable[[], object], folder: Path) -> list[Hop]:
    """Return the functions in a folder that a call runs through in this thread, in the order of their first calls."""
    prefix = f"{folder}/"
    counts: dict[CodeType, int] = {}
    depths: dict[CodeType, int] = {}
    running: list[bool] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call":
            is_counted = code.co_filename.startswith(prefix) and code.co_name not in _COMPREHENSIONS
            if is_counted:
                counts[code] = counts.get(code, 0) + 1
                depths.setdefault(code, sum(running))
            running.append(is_counted)
        elif event == "return" and running:  # else this function itself has returned
            running.pop()

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [
        Hop(
            code.co_qualname,
            code.co_filename.removeprefix(prefix),
            code.co_firstlineno,
            depths[code],
            count,
        )
        for code, count in counts.items()
    ]


def shortest_path(operation: str) -> dict[str, list[Hop]]:
    """Collective. Return the functions of rankwise, and those of torch, that an operation runs through on this rank."""
    paths = {}
    for package, call in calls_of(operation).items():
        for _ in range(WARM_UP):
            call()
        paths[package] = min((trace(call, _FOLDERS[package]) for _ in range(CALLS)), key=len)
    return paths


def files_of(hops: Sequence[Hop]) -> list[str]:
    """Return the files of functions, in the order of their first calls."""
    return list(dict.fromkeys(hop.file for hop in hops))


def measure(operation: str) -> dict[str, list[Hop]]:
    """Collective. Join, and return the functions on this rank."""
    torch.set_num_threads(1)
    with rw.init():
        return shortest_path(operation)


def record_forms(add: Callable[[str], object]) -> None:
    """Pass the name of each form of `fail`'s exception to a function, from now on in this thread, maybe repeatedly."""
    prefix = f"{_FOLDERS['rankwise']}/"

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame.f_code.co_filename.startswith(prefix):
            for value in (*frame.f_locals.values(), argument):
                if _is_form(value):
                    add(type(value).__name__)

    sys.setprofile(profile)


def _is_form(value: object) -> bool:
    kind = type(value)
    if isinstance(value, BaseException):
        return MESSAGE in str(value)
    if kind.__module__.partition(".")[0] != "rankwise":
        return False
    names = {*getattr(value, "__dict__", ()), *getattr(kind, "__slots__", ())}
    return any(isinstance(text := getattr(value, name, None), str) and MESSAGE in text for name in names)


def fail(folder: str) -> None:
    """Raise on rank 1 before it can take part in a collective, with the forms of each rank in a file of its name."""
    rw.init()
    file = os.open(Path(folder) / f"rank {rw.get_rank()}", os.O_WRONLY | os.O_CREAT)
    record_forms(lambda form: os.write(file, f"{form}\n".encode()))
    with collective("check") as members:
        if rw.get_rank() == 1:
            raise ValueError(MESSAGE)
        members.verify()


def forms_of_failure() -> dict[str, list[str]]:
    """Return the classes that an exception of rank 1 passes through, in each of three processes."""
    launcher: list[str] = []
    record_forms(launcher.append)
    try:
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.suppress(rw.RankFailedError):
                rw.launch(fail, folder, nproc=2)
            found = {path.name: path.read_text().split() for path in sorted(Path(folder).iterdir(), reverse=True)}
    finally:
        sys.setprofile(None)
    return {process: list(dict.fromkeys(forms)) for process, forms in {**found, "launcher": launcher}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", nargs="?", choices=OPERATIONS, default="all_reduce")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--quiet", action="store_true", help="print the numbers alone")
    parser.add_argument("--failure", action="store_true", help="the forms of an exception of a rank instead")
    arguments = parser.parse_args()
    if arguments.failure:
        for process, forms in forms_of_failure().items():
            print(f"{process}: {', '.join(forms)}")
        return
    of_ranks = rw.launch(measure, arguments.operation, nproc=arguments.ranks)
    for package in _FOLDERS:
        hops = max((paths[package] for paths in of_ranks), key=len)
        for hop in () if arguments.quiet else hops:
            print(f"{'  ' * hop.depth}{hop.name}  {hop.file}:{hop.line}{f' ({hop.calls}x)' if hop.calls > 1 else ''}")
        print(
            f"{package}: {arguments.operation} on the rank with the most of {arguments.ranks}: "
            f"{len(files_of(hops))} files, {len(hops)} functions, {sum(hop.calls for hop in hops)} calls"
        )


if __name__ == "__main__":
    main()
