"""The files of one checkpoint: tensors as `torch.distributed.checkpoint` has them, and all other values as pickles.

Nothing here communicates. A checkpoint is valid when it has its marker, which is written last.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from rankwise._text import ranks_text
from rankwise._training.random_streams import random_state, set_random_state
from rankwise.errors import CollectiveTimeoutError, InvalidArgumentError

# Step, and number of the checkpoint in its folder.
_NAME: Final = re.compile(r"step_\d+\.\d+")
_MARKER: Final = "complete"
_VALUES: Final = "values.pt"
_POLL_SECONDS: Final = (0.01, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a checkpoint has.

    Attributes:
        tensors: Those of modules and optimizers, by "name/name in its state"; of a DTensor, the part of this rank.
        values: All else, by name; None on other ranks than rank zero.
        random: The state of the random generators of this rank.
    """

    tensors: dict[str, torch.Tensor]
    values: bytes | None
    random: bytes

    @classmethod
    def of(cls, objects: Mapping[str, Any], *, has_values: bool) -> Content:
        """Return the content of objects and values, as it is now; tensors are not copied."""
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, object] = {}
        for name, value in objects.items():
            if isinstance(value, torch.nn.Module):
                values[name] = _without_tensors(get_model_state_dict(value), name, tensors)
            elif isinstance(value, torch.optim.Optimizer):
                state = value.state_dict()
                kept = {
                    index: _without_tensors(entry, f"{name}/{index}", tensors)
                    for index, entry in state["state"].items()
                }
                values[name] = {**state, "state": kept}
            else:
                values[name] = value.state_dict() if is_stateful(value) else value
        return cls(tensors=tensors, values=_pickled(values) if has_values else None, random=_pickled(random_state()))


class _Planner(DefaultSavePlanner):
    """A plan of what this rank writes; of values that all ranks have, rank zero writes its own."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self._copies: dict[MetadataIndex, torch.Tensor] = {}

    def copy_data(self, plan: SavePlan) -> None:
        """Copy what a plan has to the memory of the host."""
        for item in plan.items:
            data = super().resolve_data(item)
            if isinstance(data, torch.Tensor):
                self._copies[item.index] = data.detach().to("cpu", copy=True)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._copies[write_item.index] if self._copies else super().resolve_data(write_item)


class Writing:
    """The part of one rank in the writing of a checkpoint: `plan`, `prepare`, then `write` and `finish`, or a thread.

    Rank zero also decides what each rank writes, in `share`, and ends the writing, in `finish`.
    """

    def __init__(self, path: Path, content: Content, *, rank: int, world_size: int, keep: int | None) -> None:
        self._path = path
        self._content = content
        self._rank = rank
        self._files = [_file_of(path, other) for other in range(world_size)]
        self._keep = keep
        self._planner = _Planner()
        # Else it would use streams of the device, that of this thread: a thread of ours would have the first one.
        self._writer = FileSystemWriter(path, per_thread_copy_ahead=0)
        self._metadata: Metadata | None = None
        self._thread: threading.Thread | None = None
        self._is_written = threading.Event()
        self._is_given_up = threading.Event()
        self._error: Exception | None = None

    def plan(self) -> bytes:
        """Return what this rank could write, for `share`."""
        self._writer.set_up_storage_writer(self._rank == 0)
        self._planner.set_up_planner(self._content.tensors, is_coordinator=self._rank == 0)
        return pickle.dumps(self._writer.prepare_local_plan(self._planner.create_local_plan()))

    def share(self, plans: Iterable[bytes]) -> list[bytes]:
        """Return what each rank writes, for `prepare`."""
        shared, self._metadata = self._planner.create_global_plan([pickle.loads(plan) for plan in plans])
        return [pickle.dumps(plan) for plan in self._writer.prepare_global_plan(shared)]

    def prepare(self, plan: bytes, *, copies: bool) -> None:
        """Prepare to write; with `copies` the tensors may change afterwards."""
        self._plan = self._planner.finish_plan(pickle.loads(plan))
        if copies:
            self._planner.copy_data(self._plan)

    def write(self) -> None:
        """Write the files of this rank."""
        results = self._writer.write_data(self._plan, self._planner).wait()
        if self._content.values is not None:
            _write_file(self._path / _VALUES, self._content.values)
        # The last one: it says that this rank has written.
        _write_file(self._files[self._rank], _pickled({"random": self._content.random, "results": results}))

    def finish(self) -> None:
        """Make the checkpoint valid, and remove old ones; on rank zero, when all ranks have written."""
        if self._metadata is None:
            return
        self._writer.finish(self._metadata, [torch.load(file, weights_only=False)["results"] for file in self._files])
        _write_file(self._path / _MARKER, json.dumps({"world_size": len(self._files)}).encode())
        _sync_folder(self._path.parent)
        remove_old(self._path.parent, self._keep)

    def start(self, timeout: float) -> None:
        """Write and finish in a thread; rank zero waits there for the files of the others."""
        self._thread = threading.Thread(target=self._run, args=(timeout,), name="rankwise-checkpoint")
        self._thread.start()

    def wait_written(self) -> None:
        """Wait until the thread has written the files of this rank, and raise its error."""
        self._is_written.wait()
        if self._error is not None:
            raise self._error

    def wait_finished(self) -> None:
        """Wait until the thread has ended, and raise its error."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Do not wait for the files of other ranks any more."""
        self._is_given_up.set()

    def _run(self, timeout: float) -> None:
        try:
            self.write()
            self._is_written.set()
            if self._metadata is not None and self._all_have_written(timeout):
                self.finish()
        except Exception as error:  # noqa: BLE001 - raised by `wait_written` and `wait_finished`
            self._error = error
        finally:
            self._is_written.set()

    def _all_have_written(self, timeout: float) -> bool:
        """Wait for the files of the other ranks; return False if it was given up."""
        start = time.monotonic()
        shortest, longest = _POLL_SECONDS
        while missing := [rank for rank, file in enumerate(self._files) if not file.exists()]:
            waited = time.monotonic() - start
            if waited > timeout:
                raise CollectiveTimeoutError(
                    f"{self._path} is not complete: {ranks_text(missing)} did not write within {timeout:g} s"
                )
            if self._is_given_up.wait(min(max(shortest, waited / 10), longest)):
                return False
        return True


def restore(path: Path, objects: Mapping[str, Any], rank: int) -> dict[str, object]:
    """Load objects, and the random state of this rank if it is there; return the values that belong to no object.

    Raises:
        InvalidArgumentError: The objects do not fit what was saved.
    """
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    saved: dict[str, Any] = torch.load(path / _VALUES, map_location="cpu", weights_only=False)
    if missing := [name for name in objects if name not in saved]:
        raise InvalidArgumentError(f"{path} has no {missing[0]!r}, but {', '.join(saved) or 'nothing'}")
    sizes = {
        name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    targets: dict[str, torch.Tensor] = {}
    loads: list[Callable[[], object]] = []
    for name, value in objects.items():
        if isinstance(value, torch.nn.Module):
            loads.append(_module_load(value, name, saved[name], sizes, targets))
        elif isinstance(value, torch.optim.Optimizer):
            loads.append(_optimizer_load(value, name, saved[name], sizes, targets))
        else:
            loads.append(partial(value.load_state_dict, saved[name]))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    for load in loads:
        load()
    if _file_of(path, rank).exists():
        own = torch.load(_file_of(path, rank), weights_only=False)
        _set_random_state(torch.load(io.BytesIO(own["random"]), weights_only=False))
    return {name: value for name, value in saved.items() if name not in objects}


def _module_load(
    module: torch.nn.Module,
    name: str,
    values: Mapping[str, Any],
    sizes: Mapping[str, TensorStorageMetadata],
    targets: dict[str, torch.Tensor],
) -> Callable[[], object]:
    """Add the tensors of a module to those that are read, and return what loads it afterwards."""
    own = {key: value for key, value in get_model_state_dict(module).items() if isinstance(value, torch.Tensor)}
    saved = {key.removeprefix(f"{name}/"): entry for key, entry in sizes.items() if key.startswith(f"{name}/")}
    if different := sorted(own.keys() ^ saved.keys()):
        has, lacks = ("the checkpoint", "the module") if different[0] in saved else ("the module", "the checkpoint")
        raise InvalidArgumentError(
            f"{name}: {has} has {different[0]!r}, and {lacks} has not; {len(different)} of their names differ"
        )
    for key, value in own.items():
        if value.size() != saved[key].size:
            raise InvalidArgumentError(
                f"{name}: {key!r} has the shape {list(value.size())}, and {list(saved[key].size)} in the checkpoint"
            )
        targets[f"{name}/{key}"] = value
    return partial(set_model_state_dict, module, {**own, **values})


def _optimizer_load(
    optimizer: torch.optim.Optimizer,
    name: str,
    values: Mapping[str, Any],
    sizes: Mapping[str, TensorStorageMetadata],
    targets: dict[str, torch.Tensor],
) -> Callable[[], object]:
    """Add the tensors of an optimizer's state to those that are read, and return what loads it afterwards.

    The state has the form of its parameter, sharded as that is, or is a tensor for itself, such as the step of Adam.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, object]] = {index: dict(entry) for index, entry in values["state"].items()}
    for key, entry in sizes.items():
        if not key.startswith(f"{name}/"):
            continue
        index, _, of_state = key.removeprefix(f"{name}/").partition("/")
        if int(index) >= len(parameters):
            raise InvalidArgumentError(f"{name} has {len(parameters)} parameters, and more in the checkpoint")
        like, dtype = parameters[int(index)], entry.properties.dtype
        fits = like.size() == entry.size
        target = (
            torch.empty_like(like, dtype=dtype, requires_grad=False) if fits else torch.empty(entry.size, dtype=dtype)
        )
        targets[key] = state.setdefault(int(index), {})[of_state] = target.detach()
    return partial(optimizer.load_state_dict, {**values, "state": state})


def _without_tensors(state: Mapping[Any, Any], name: str, tensors: dict[str, torch.Tensor]) -> dict[Any, Any]:
    """Move the tensors of a state to `tensors`, and return the rest."""
    rest = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{name}/{key}"] = value.detach()
        else:
            rest[key] = value
    return rest


def is_stateful(value: object) -> bool:
    """Return whether an object has `state_dict()` and `load_state_dict()`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def valid_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that have their marker, the newest last."""
    return sorted((path for path in _checkpoints(folder) if (path / _MARKER).exists()), key=_number)


def new_path(folder: Path, step: int) -> Path:
    """Return the path of the next checkpoint in a folder."""
    return folder / f"step_{step}.{max(map(_number, _checkpoints(folder)), default=-1) + 1}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint."""
    return int(path.stem.removeprefix("step_"))


def remove_old(folder: Path, keep: int | None) -> None:
    """Remove all checkpoints but the newest valid ones: also those that were not completed."""
    valid = valid_checkpoints(folder)
    kept = valid if keep is None else valid[-keep:]
    for path in _checkpoints(folder):
        if path not in kept:
            (path / _MARKER).unlink(missing_ok=True)  # first: what is there in part is not valid
            shutil.rmtree(path, ignore_errors=True)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.exists() else []


def _number(path: Path) -> int:
    """Return the place of a checkpoint among all that were saved in its folder."""
    return int(path.suffix[1:])


def _file_of(path: Path, rank: int) -> Path:
    return path / f"rank_{rank}.pt"


def _pickled(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def _write_file(path: Path, data: bytes) -> None:
    """Write a file that is there completely or not at all, also after a loss of power."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_random_state(saved: Mapping[str, Any]) -> None:
    """Set the random numbers of this rank; those of accelerators only if there are as many of that kind again."""
    own = random_state()
    fitting = {name for name in own if type(saved.get(name)) is type(own[name])}
    fitting -= {name for name in fitting if isinstance(own[name], list) and len(own[name]) != len(saved[name])}
    set_random_state({name: saved[name] if name in fitting else state for name, state in own.items()})
