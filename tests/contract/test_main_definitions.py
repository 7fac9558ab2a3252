"""One body for every world: functions and classes of `__main__`, which each rank defines for itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rankwise as rw
from rankwise._comm.group import Group
from rankwise.compat import vis4d

pytestmark = pytest.mark.ranks("serial", 1, 2, 3)

SCRIPT = """
import collections, dataclasses, enum, functools, threading

class Phase(enum.Enum):
    TRAIN = 1
    TEST = "test"

class Box:
    class Inner:
        pass

    def __init__(self, content):
        self.content = content

    @functools.cached_property
    def again(self):
        return Box(self.content), Other, guard

    @staticmethod
    def find(name):
        return name in {"a", "b", "c", "d"}

class Other(Box):
    partner = Box

Box.partner = Other

@dataclasses.dataclass(frozen=True)
class Config:
    lr: float = 0.1

class Strange(Exception):
    pass

class Meta(type):
    pass

class Made(metaclass=Meta):
    __slots__ = ("x",)

Pair = collections.namedtuple("Pair", "first second")
guard = threading.Lock()

def double(number):
    return double(number - 1) + 2 if number else 0

def closure():
    return lambda: (Box, double)
"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The `__main__` module of a process that runs the script."""
    module = ModuleType("__main__")
    module.__file__ = "/somewhere/train.py"
    monkeypatch.setitem(sys.modules, "__main__", module)
    define(SCRIPT)
    return module


def define(source: str, line: int = 1) -> None:
    code = compile("\n" * (line - 1) + source, "/somewhere/train.py", "exec")
    exec(code, vars(sys.modules["__main__"]))  # noqa: S102 - as the interpreter does


def test_a_definition_on_every_rank_is_resolved_locally(comm: Group, main: Any, tmp_path: Path) -> None:
    """Also if a definition refers to an object that cannot be pickled, as `Box` does."""
    rank = rw.get_rank()
    everyones = rw.all_gather({"phase": main.Phase.TEST, "box": main.Other(rank), "config": main.Config(rank)})
    for other, theirs in enumerate(everyones):
        assert theirs["phase"] is main.Phase.TEST
        assert type(theirs["box"]) is main.Other
        assert theirs["config"] == main.Config(other)
    for value in (main.Phase, main.Box, main.Box.Inner, main.Other, main.Pair, main.Made, main.Strange, main.double):
        assert rw.broadcast(value) is value
        assert rw.scatter([value] * comm.size) is value
        assert all(theirs is value for theirs in rw.all_to_all([value] * comm.size))
        assert rw.gather(value, dst=comm.size - 1) in (None, [value] * comm.size)
    assert rw.broadcast(main.closure())() == (main.Box, main.double)
    assert type(rw.broadcast(main.Strange("x"))) is main.Strange
    folder = rw.broadcast(str(tmp_path))
    assert (
        vis4d.all_gather_object_cpu(main.Phase.TEST, folder, rank_zero_return_only=False)
        == [main.Phase.TEST] * comm.size
    )


def test_a_definition_on_one_rank_is_sent_with_its_values(comm: Group, main: Any) -> None:
    source = """
class Alone:
    def __init__(self, content):
        self.content = content
    def same(self):
        return Alone(self.content), Box, count(3)
def count(number):
    return count(number - 1) + [number] if number else []
"""
    last = comm.size - 1
    if rw.get_rank() == last:
        define(source)
        value = [main.Alone(7), main.Alone, main.count, main.Box]
    received: Any = rw.broadcast(value if rw.get_rank() == last else None, src=last)
    alone, cls, count, box = received
    assert type(alone) is cls
    assert box is main.Box
    assert count(2) == [1, 2]
    # The class is sent by value, and refers to the definitions of this rank where there are any.
    again, box, numbers = alone.same()
    assert (type(again), again.content, box, numbers) == (cls, 7, main.Box, [1, 2, 3])
    assert hasattr(main, "Alone") == (rw.get_rank() == last)


@pytest.mark.parametrize(
    ("name", "definition"),
    [
        ("Config", "@dataclasses.dataclass\nclass Config:\n    lr: float = 1.0\n    rank: int = {rank}\n"),
        ("Phase", "class Phase(enum.Enum):\n    TRAIN = {rank}\n"),
        ("double", "def double(number):\n    return {rank} * number\n"),
    ],
)
def test_a_definition_that_differs_between_ranks_is_the_senders(
    comm: Group, main: Any, name: str, definition: str
) -> None:
    define(definition.format(rank=rw.get_rank() + 5))
    for src, theirs in enumerate(rw.all_gather(getattr(main, name))):
        if name == "double":
            assert theirs(10) == (src + 5) * 10
        elif name == "Phase":
            assert theirs.TRAIN.value == src + 5
        assert (theirs is getattr(main, name)) == (src == rw.get_rank())


def test_ranks_that_run_different_scripts(comm: Group, main: Any) -> None:
    rank = rw.get_rank()
    main.__file__ = f"/somewhere/{rank}.py"
    define("class Ours:\n    pass\n")
    assert [theirs is main.Ours for theirs in rw.all_gather(main.Ours)] == [src == rank for src in range(comm.size)]


def test_a_definition_that_cannot_be_sent_is_named(comm: Group, main: Any) -> None:
    if rw.get_rank() == 0:
        define("def locked():\n    return guard\n")
    value = main.locked if rw.get_rank() == 0 else None
    if rw.get_rank() == 0:
        assert rw.broadcast(value) is value
    else:
        with pytest.raises(rw.PayloadTypeError, match=r"'locked'.*cannot be pickled: .*lock.*define it in a module"):
            rw.broadcast(value)
    assert rw.all_reduce(1) == comm.size
    assert isinstance(main.guard, type(threading.Lock()))
