"""What type checkers make of the public names: checked by mypy, and run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, assert_type

import torch
from torch.distributed.device_mesh import init_device_mesh

import rankwise as rw
from rankwise import *  # noqa: F403 - that is the point

barrier("of a star import")  # noqa: F405
assert_type(get_rank(), int)  # noqa: F405
assert_type(rw.__version__, str)
assert_type(rw.RankFailedError("x", failures=[rw.RankFailure(rank=0, host="h", exitcode=1)]).failures[0].exitcode, int)


def operation() -> str:
    return "sum"


def pair() -> tuple[int, torch.Tensor]:
    return 1, torch.ones(1)


assert_type(rw.all_reduce(3), int)
assert_type(rw.all_reduce(3, "max"), int)
assert_type(rw.all_reduce(3, op="mean"), float)
assert_type(rw.all_reduce(3, operation()), int | float)
assert_type(rw.all_reduce(True), int)
assert_type(rw.all_reduce(True, op="mean"), float)
assert_type(rw.all_reduce(True, op="and"), bool)
assert_type(rw.all_reduce(True, op="max"), bool)
assert_type(rw.all_reduce(0.5), float)
assert_type(rw.all_reduce(0.5, op="mean"), float)
assert_type(rw.all_reduce(torch.nn.Parameter(torch.ones(1))), torch.Tensor)
assert_type(rw.all_reduce({"seen": 8}, op="mean"), dict[str, float])
assert_type(rw.all_reduce({"seen": 8}), dict[str, int])
assert_type(rw.all_reduce([1, 2], op="mean"), list[float])
logged: dict[str, float] = {"loss": 0.5, "seen": 8}
assert_type(rw.all_reduce(logged, op="mean"), dict[str, float])
assert_type(rw.all_reduce(pair()), tuple[int, torch.Tensor])
assert_type(rw.all_reduce_(torch.ones(1)), torch.Tensor)

assert_type(rw.all_gather("a"), list[str])
assert_type(rw.all_gather_cat(torch.ones(1)), torch.Tensor)
assert_type(rw.gather(1), list[int] | None)
assert_type(rw.reduce(1), int | None)
assert_type(rw.reduce(1, op="mean"), float | None)
assert_type(rw.reduce(1, operation()), int | float | None)
assert_type(rw.reduce(True, op="and"), bool | None)
assert_type(rw.reduce(torch.ones(1), dst=0), torch.Tensor | None)
assert_type(rw.reduce(logged), dict[str, float] | None)
assert_type(rw.broadcast("a"), str)
assert_type(rw.all_to_all(["a"]), list[str])
assert_type(rw.all_to_all(torch.ones(1)), list[torch.Tensor])
assert_type(rw.scatter([1.5]), float)
assert_type(rw.reduce_scatter([torch.ones(1)]), torch.Tensor)

assert_type(rw.all_reduce(3, async_op=True), rw.Work[int]).wait()
assert_type(rw.all_reduce(3, op="mean", async_op=True).wait(), float)
assert_type(rw.all_reduce(3, operation(), async_op=True).wait(), int | float)
assert_type(rw.all_reduce(True, op="and", async_op=True).wait(), bool)
assert_type(rw.all_reduce(torch.nn.Parameter(torch.ones(1)), async_op=True).wait(timeout=60), torch.Tensor)
assert_type(rw.all_reduce({"seen": 8}, op="mean", async_op=True).wait(), dict[str, float])
assert_type(rw.all_reduce([1, 2], op="mean", async_op=True).wait(), list[float])
assert_type(rw.all_reduce(pair(), async_op=True).wait(), tuple[int, torch.Tensor])
assert_type(rw.all_reduce_(torch.ones(1), async_op=True), rw.Work[torch.Tensor]).wait()
assert_type(rw.all_gather("a", async_op=True).wait(), list[str])
assert_type(rw.all_gather("a", async_op=False), list[str])
assert_type(rw.all_gather_cat(torch.ones(1), async_op=True).wait(), torch.Tensor)
assert_type(rw.gather(1, async_op=True).wait(), list[int] | None)
assert_type(rw.broadcast("a", async_op=True).wait(), str)
assert_type(rw.scatter([1.5], async_op=True).wait(), float)
assert_type(rw.reduce_scatter([torch.ones(1)], async_op=True).wait(), torch.Tensor)
assert_type(rw.reduce(3, async_op=True), rw.Work[int | None]).wait()
assert_type(rw.reduce(3, "mean", async_op=True).wait(), float | None)
assert_type(rw.reduce(3, operation(), async_op=True).wait(), int | float | None)
assert_type(rw.reduce(True, "or", async_op=True).wait(), bool | None)
assert_type(rw.reduce(torch.ones(1), async_op=True).wait(), torch.Tensor | None)
assert_type(rw.reduce(pair(), async_op=True).wait(), tuple[int, torch.Tensor] | None)
assert_type(rw.all_to_all(["a"], async_op=True), rw.Work[list[str]]).wait()
assert_type(rw.all_to_all(torch.ones(1, 2), async_op=True).wait(), list[torch.Tensor])
assert_type(rw.barrier(async_op=True), rw.Work[None]).wait()
if rw.get_world_size() > 1:
    assert_type(rw.send("a", dst=1, async_op=True), rw.Work[None]).wait()
    assert_type(rw.recv(src=0, async_op=True), rw.Work[Any]).wait()
barrier_work: rw.Work[None] | None = rw.barrier(async_op=operation() == "sum")
assert_type(barrier_work is None or barrier_work.done(), bool)
if barrier_work is not None:
    barrier_work.wait()
scores: rw.Work[float] = rw.all_reduce(3, async_op=True)  # a work of int is one of float
scores.wait()


async def awaited() -> int:
    return await rw.all_reduce(3, async_op=True)


assert_type(asyncio.run(awaited()), int)
with rw.new_group([0]) as group:
    assert_type(group, rw.Group)
    assert_type(group.ranks, tuple[int, ...])
    assert_type(rw.all_reduce(3, op="mean", group=group), float)
    assert_type(rw.broadcast("a", src=rw.GroupRank(0), group=group), str)
    if torch.distributed.is_initialized():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        assert_type(rw.all_reduce(3, op="mean", group=mesh["tp"]), float)
        assert_type(rw.all_gather("a", group=mesh.get_group()), list[str])


@rw.one_rank_only()
def shared(path: str) -> int:
    return len(path)


@rw.one_rank_only(0, share=False)
def kept(path: str) -> int:
    return len(path)


@rw.rank_zero_only
def on_zero(path: str) -> int:
    return len(path)


@rw.rank_zero_first(local=True)
def first(path: str) -> int:
    return len(path)


assert_type(shared("a"), int)
assert_type(kept("a"), int | None)
assert_type(on_zero("a"), int | None)
assert_type(first("a"), int)


class Saver:
    """Methods of all kinds."""

    @rw.rank_zero_only
    def method(self, path: str) -> int:
        return len(path)

    @rw.rank_zero_only
    @classmethod
    def of_class(cls, path: str) -> int:
        return len(path)

    @rw.one_rank_only(share=False)
    @staticmethod
    def static(path: str) -> int:
        return len(path)


assert_type(Saver().method("a"), int | None)
assert_type(Saver.of_class("a"), int | None)
assert_type(Saver.static("a"), int | None)
with rw.one_rank_only() as mine:
    assert_type(mine, bool)
turns: Callable[[], AbstractContextManager[None]] = rw.in_rank_order
with rw.init() as session:
    assert_type(session, rw.Session)
    assert_type(session.topology, rw.Topology)
    assert_type(rw.device(), torch.device)
    assert_type(rw.backend(), str | None)
