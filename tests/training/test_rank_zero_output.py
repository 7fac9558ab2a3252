"""Output of rank zero alone: print, bars, and objects that do nothing on other ranks."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any, Self

import pytest

import rankwise as rw
from rankwise._comm.group import Group
from rankwise._training import rank_zero_output
from tests.tables import each_row

pytestmark = pytest.mark.ranks("serial", 2)


class Writer:
    """A logger, as that of TensorBoard."""

    def __init__(self, folder: str, *, name: str = "") -> None:
        self.folder, self.name = folder, name
        self.logged: list[tuple[str, float]] = []
        self.config: dict[str, Any] = {}

    def add_scalar(self, name: str, value: float) -> None:
        self.logged.append((name, value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.logged.append(("closed", 0.0))


def test_an_object_is_there_on_rank_zero_and_does_nothing_elsewhere(comm: Group) -> None:
    writer = rw.on_rank_zero(Writer, "runs", name="a")
    with writer as same:
        same.add_scalar("loss", 0.5)
        same.name = "b"
        same.config["lr"] = 0.1
        same.config.update(lr=0.2)
        del same.config["lr"]
    if rw.is_rank_zero():
        assert type(writer) is Writer
        assert (writer.folder, writer.name, writer.config) == ("runs", "b", {})
        assert writer.logged == [("loss", 0.5), ("closed", 0.0)]
        return
    assert repr(writer.config["lr"]) == "<Writer.config['lr'] on rank zero only>"
    other: Any = writer
    for use in (len, int, float, iter, list, sum, lambda one: one + 1, lambda one: one < 1, lambda one: 1 in one):
        with pytest.raises(TypeError):
            use(other)
    with pytest.raises(TypeError, match=r"rankwise\.progress"):
        list(other.logged)


def test_an_error_in_making_it_is_that_of_rank_zero(comm: Group) -> None:
    if rw.is_rank_zero():
        with pytest.raises(TypeError):
            rw.on_rank_zero(Writer)  # type: ignore[call-arg]  # that is the point
    else:
        rw.on_rank_zero(Writer)  # type: ignore[call-arg]
    with pytest.raises(rw.InvalidArgumentError, match="got 3"):
        rw.on_rank_zero(3)  # type: ignore[arg-type]


def test_print_is_the_builtin_on_rank_zero(comm: Group) -> None:
    file = io.StringIO()
    rw.print("a", 1, sep="-", end="!", file=file, flush=True)
    assert file.getvalue() == ("a-1!" if rw.is_rank_zero() else "")


def generated() -> Iterator[int]:
    yield from range(3)


@each_row("missing", [(), ("tqdm",), ("tqdm", "rich")], ids=str, collective=True)
def test_all_elements_come_with_any_bar(
    comm: Group, missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # else there would be a thread
    monkeypatch.setattr(rank_zero_output, "find_spec", lambda name: None if name in missing else name)
    before = set(threading.enumerate())
    assert list(rw.progress([1, 2, 3], "epoch 1")) == [1, 2, 3]
    assert list(rw.progress(generated())) == [0, 1, 2]
    for thread in set(threading.enumerate()) - before:  # rich does not wait for its own
        thread.join()
    shown = capfd.readouterr()
    has_bar = rw.is_rank_zero() and len(missing) < 2
    assert ("epoch 1" in shown.err + shown.out) == has_bar
