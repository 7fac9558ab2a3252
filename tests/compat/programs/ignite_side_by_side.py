"""The original and the drop-in on the same inputs, in the same ranks: they agree, or the original cannot.

Runs alone, or in the world that the launcher's variables name, where the drop-in joins. Prints "ok".
"""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import ignite.distributed as original
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import rankwise.compat.ignite as idist

torch.set_num_threads(1)
warnings.simplefilter("ignore")
if "RANK" in os.environ:
    idist.initialize("gloo")
RANK, SIZE, ALONE = idist.get_rank(), idist.get_world_size(), idist.backend() is None
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR")


def both(name: str, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any] | None:
    """Return the results of both for a value, with the value afterwards; None if the original raises."""
    theirs, ours = copy.deepcopy(value), value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = getattr(original, name)(theirs, *args, **kwargs)
    except (RuntimeError, ValueError):
        return None
    return (getattr(idist, name)(ours, *args, **kwargs), ours), (expected, theirs)


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two results are alike, in type too."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and bool((ours == theirs).all())
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def check_tensors() -> None:
    for dtype in DTYPES:
        check_dtype(dtype)


def check_dtype(dtype: torch.dtype) -> None:
    value = torch.tensor([[RANK + 1, 3, 0], [1, RANK, RANK % 2]]).to(dtype)
    cannot = set()
    for op in OPS:
        pair = both("all_reduce", value.clone(), op=op)
        if pair is None:
            cannot.add(op)
        else:
            assert same(*pair), (dtype, op)
    for name, arguments in (("all_gather", {}), ("broadcast", {"src": SIZE - 1})):
        for tensor in (value, value[0, 0], value[:0]):
            pair = both(name, tensor.clone(), **arguments)
            if pair is None:
                cannot.add(name)
            else:
                assert same(*pair), (dtype, name)
    wanted: set[str] = set()
    if dtype is torch.int16:
        wanted = {*OPS, "all_gather", "broadcast"}  # gloo has no such integers
    elif dtype.is_complex:
        wanted = set(OPS[1:])
    elif dtype.is_floating_point:
        wanted = {"AND", "OR"}
    assert cannot == (set() if ALONE else wanted)


def check_numbers() -> None:
    for number in (RANK, RANK + 0.25, RANK % 2 == 0, -(2**10) * (RANK + 1)):
        for op in OPS:
            if isinstance(number, float) and op in {"AND", "OR"}:
                continue
            pair = both("all_reduce", number, op=op)
            assert pair is not None
            assert same(*pair), (number, op)
        pair = both("all_gather", number)
        assert pair is not None
        assert same(*pair)
    pair = both("broadcast", 0.5 + RANK, src=SIZE - 1)
    assert pair is not None
    assert same(*pair), "a float that float32 holds"


def check_strings_and_objects() -> None:
    for text in ("", "abc", "x" * (RANK + 1), "longer " * 900):
        for name in ("all_gather", "broadcast"):
            pair = both(name, text)
            assert pair is not None
            assert same(*pair)
    for value in ([RANK], {"rank": RANK}, (RANK, "a"), None, b"bytes"):
        pair = both("all_gather", value)
        assert pair is not None
        assert same(*pair)
    for sent in ("abc", Path("/tmp"), 0.5, torch.ones(2, 3, dtype=torch.int32)):
        pair = both("broadcast", sent if RANK == 0 else None, safe_mode=True)
        assert pair is not None
        assert same(pair[0][0], pair[1][0])


def check_groups() -> None:
    members = [other for other in range(SIZE) if other % 2 == 0]
    for value in (RANK, float(RANK), torch.tensor([RANK, 1]), torch.tensor(RANK)):
        for name in ("all_reduce", "all_gather"):
            group = idist.new_group(members)
            pairs = [both(name, copy.deepcopy(value), group=group)]
            if RANK in members:  # the original answers in another form outside of a list of ranks
                pairs.append(both(name, copy.deepcopy(value), group=members))
            elif not ALONE:
                getattr(original, name)(copy.deepcopy(value), group=members)
                getattr(idist, name)(copy.deepcopy(value), group=members)
            for pair in pairs:
                assert pair is not None
                assert same(*pair), (name, value)
    shapes = [[other + 1, 2] for other in members]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = original.all_gather_tensors_with_shapes(torch.ones(RANK + 1, 2) * RANK, shapes, group=members)
    ours = idist.all_gather_tensors_with_shapes(torch.ones(RANK + 1, 2) * RANK, shapes, group=members)
    assert same(ours, theirs)


def check_samplers_over_epochs() -> None:
    """What the original's `torch.manual_seed` makes all ranks draw, all ranks draw."""
    data = range(11)
    makers = (
        lambda: RandomSampler(data),
        lambda: RandomSampler(data, replacement=True, num_samples=7),
        lambda: SequentialSampler(data),
        lambda: WeightedRandomSampler([0.1, 0.5, 0.2, 0.9, 0.3], 9),
        lambda: BatchSampler(RandomSampler(data), 3, drop_last=False),
    )
    for make in makers:
        for size in (1, 2, 3, 4):
            samplers = [
                module.DistributedProxySampler(make(), num_replicas=size, rank=RANK % size)
                for module in (idist, original)
            ]
            for epoch in (0, 1, 5):
                for sampler in samplers:
                    sampler.set_epoch(epoch)
                ours, theirs = [list(sampler) for sampler in samplers]
                assert ours == theirs
                assert len(ours) == len(samplers[0])


def check_loaders() -> None:
    data: Any = torch.arange(22)
    cases: tuple[dict[str, Any], ...] = (
        {"batch_size": 8},
        {"batch_size": 1, "shuffle": False},
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 22, 22)},
        {"batch_size": 4, "sampler": DistributedSampler(data, num_replicas=SIZE, rank=RANK)},
        {},
    )
    for case in cases:
        loaders = [module.auto_dataloader(data, **case) for module in (idist, original)]
        batches = []
        for loader in loaders:
            torch.manual_seed(3)
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(2)
            batches.append([batch.tolist() for batch in loader])
        ours, theirs = loaders
        assert batches[0] == batches[1]
        assert type(ours.sampler).__name__ == type(theirs.sampler).__name__
        assert (ours.batch_size, ours.pin_memory) == (theirs.batch_size, theirs.pin_memory)
    workers = [module.auto_dataloader(data, num_workers=SIZE + 1).num_workers for module in (idist, original)]
    assert workers[0] == workers[1] == 2


def check_getters() -> None:
    names = ("rank", "world_size", "local_rank", "nproc_per_node", "nnodes", "node_rank")
    for name in [*(f"get_{name}" for name in names), "backend", "device", "model_name", "hostname"]:
        assert getattr(idist, name)() == getattr(original, name)(), name


check_getters()
check_tensors()
check_numbers()
check_strings_and_objects()
check_groups()
check_samplers_over_epochs()
check_loaders()
idist.finalize()
print("ok")
