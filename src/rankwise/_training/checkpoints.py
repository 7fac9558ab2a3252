"""Checkpoints of all ranks in a folder, of which the newest valid one is found again.

The ranks agree before and after they write, by the calls of this package: a process group of torch takes no part.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rankwise._arguments import as_bool, as_integer
from rankwise._collectives.groups import comm_of
from rankwise._collectives.rooted import gather
from rankwise._collectives.scatter import scatter
from rankwise._session.current import current_session
from rankwise._session.environ import own_restart_count
from rankwise._training.folder_owner import FolderOwner
from rankwise.errors import InvalidArgumentError, shown

if TYPE_CHECKING:
    from rankwise._comm.comm import Comm
    from rankwise._training.checkpoint_files import Writing

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a job, in a folder that all ranks see.

    Each is a folder `step_STEP.N`, numbered in the order in which they were saved, with the tensors of modules and
    optimizers as `torch.distributed.checkpoint` has them, all other values as pickles, and a marker, `complete`, that
    is written last: without it a checkpoint does not exist for `load`. Files are synced to the disk before. Pickles are
    code: load those of people whom you trust.

    A folder has one job that writes: another one is refused in `save` as long as the heartbeat of the first goes on,
    and for 25 seconds afterwards. A restart of the same job takes the folder at once, and so does a job on the same
    host if the process is gone. Any job may read.

    A context manager; at its end `close()`.

    Args:
        folder: The folder; it is made by the first `save`.
        keep: How many of the newest checkpoints stay; None for all. Older ones are removed when a newer one is valid.

    Raises:
        InvalidArgumentError: `folder` is not a path, or `keep` is below 1.

    Attributes:
        values: After `load`, the values of that checkpoint that it had not to load into an object, by name.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as saves:
        ...     saves.load(model=model, optimizer=optimizer)  # None: there is none
        ...     saves.save(100, model=model, optimizer=optimizer, best=0.25)
        ...     saves.load(model=model, optimizer=optimizer)
        ...     saves.values
        100
        {'best': 0.25}
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3) -> None:
        try:
            self._folder = Path(os.fspath(folder)).absolute()
        except TypeError:
            raise InvalidArgumentError(f"folder={shown(folder)} is not a path") from None
        self._keep = None if keep is None else as_integer(keep, "keep")
        if self._keep is not None and self._keep < 1:
            raise InvalidArgumentError(f"keep={keep} is below 1; keep=None keeps all checkpoints")
        self._owner: FolderOwner | None = None
        self._writing: Writing | None = None
        self.values: dict[str, Any] = {}

    def save(self, step: int, /, *, async_op: bool = False, **objects: Any) -> None:  # noqa: ANN401 - any
        """Save a checkpoint of all ranks: it is valid when this returns, or with `async_op` some time later.

        Collective over the session. Of a module its parameters and buffers, by their names without wrapping: DDP, the
        compiler and FSDP2 make no difference. Of an optimizer its state, by the order of its parameters. Of DTensors
        each rank writes its part; of all other tensors and values rank zero writes its own. The state of the random
        generators of each rank is saved too: those of Python, numpy and torch, on the CPU and on the device of the
        rank. An earlier save that has not ended is awaited first.

        Args:
            step: The number of the step, at least 0. The newest checkpoint is that saved last, whatever its step.
            async_op: Whether to return when all is copied to the memory of the host, and to write in a thread. An error
                is raised by the next call of this object.
            **objects: Modules, optimizers; other objects with `state_dict` and `load_state_dict`, such as samplers; and
                any values that can be pickled.

        Raises:
            InvalidArgumentError: An argument is not as above; or another job writes to the folder.
            OSError, RuntimeError: A file cannot be written. The checkpoints that were there remain.
            RemoteRankError: This, or another error such as one of pickle, occurred on another rank.
            MismatchError: The ranks save other steps or names, or another rank calls another collective.
            CollectiveError: A rank is dead, or did not call or write within the session's timeout.
            NotJoinedError: The world has more than one rank, and this process has not joined it.
        """
        from rankwise._training.checkpoint_files import Content, Writing, new_path  # noqa: PLC0415 - slow to import

        self.wait()
        comm = comm_of(None)
        with comm.call("Checkpoints.save", {"folder": str(self._folder)}) as call:
            number, is_async = as_integer(step, "step"), as_bool(async_op, "async_op")
            if number < 0:
                raise InvalidArgumentError(f"step={number} is below 0")
            call.settings = {**call.settings, "step": number, "async_op": is_async, "objects": sorted(objects)}
            content = Content.of(objects, has_values=comm.rank == 0)
            name = b""
            if comm.rank == 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._take_folder()
                name = new_path(self._folder, number).name.encode()
            name = call.broadcast(name, 0)
        path = self._folder / name.decode()
        writing = Writing(path, content, rank=call.rank, world_size=comm.size, keep=self._keep)
        plans = gather(_together(comm, "plan", writing.plan), dst=0)
        shared = _together(comm, "share", lambda: None if plans is None else writing.share(plans))
        own = scatter(shared, src=0)
        _together(comm, "prepare", lambda: writing.prepare(own, copies=is_async))
        if is_async:
            writing.start(current_session().timeout)
            self._writing = writing
        else:
            _together(comm, "write", writing.write)
            _together(comm, "finish", writing.finish)

    def wait(self) -> None:
        """Wait until the last `save` with `async_op` is complete.

        Collective over the session; Local if there was none.

        Raises:
            OSError: A file could not be written, on this rank.
            RemoteRankError: This, or another error, occurred on another rank.
            CollectiveError: A rank is dead, or has not written within the session's timeout.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        comm = comm_of(None)
        try:
            _together(comm, "write", writing.wait_written)
            _together(comm, "finish", writing.wait_finished)
        finally:
            writing.give_up()

    def load(self, **objects: Any) -> int | None:  # noqa: ANN401 - any
        """Load the newest valid checkpoint into objects, and return its step; None if there is none.

        Collective over the session, of any size. Objects are loaded in place, wrapped as they are. After an error some
        may be loaded and others not. The random state is set on the ranks that the saving world had too, and left alone
        on others.

        Args:
            **objects: Objects by the names under which they were saved; not all of them are needed.

        Raises:
            InvalidArgumentError: The checkpoint has no object of this name, or one with other parameters; or this one
                has no `load_state_dict`.
            OSError: A file cannot be read on this rank.
            RemoteRankError: This, or another error, occurred on another rank.
            MismatchError: The ranks pass other names, or another rank calls another collective.
            CollectiveError: A rank is dead, or did not come within the session's timeout.
            NotJoinedError: The world has more than one rank, and this process has not joined it.
        """
        from rankwise._training.checkpoint_files import (  # noqa: PLC0415 - slow to import
            is_stateful,
            restore,
            step_of,
            valid_checkpoints,
        )

        self.wait()
        comm = comm_of(None)
        with comm.call("Checkpoints.load", {"folder": str(self._folder), "objects": sorted(objects)}) as call:
            for name, value in objects.items():
                if not is_stateful(value):
                    raise InvalidArgumentError(
                        f"{name}={shown(value)} has no load_state_dict(): after load(), {name!r} is in `values`"
                    )
            valid = valid_checkpoints(self._folder) if comm.rank == 0 else []
            newest = call.broadcast(valid[-1].name.encode() if valid else b"", 0).decode()
        rank = call.rank
        if not newest:
            return None
        path = self._folder / newest
        self.values = _together(comm, "load", lambda: restore(path, objects, rank))
        return step_of(path)

    def close(self) -> None:
        """Wait for the last `save`, and give the folder back to other jobs.

        As `wait`.
        """
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # without waiting for the other ranks; a thread that writes goes on
            self._release()

    def _take_folder(self) -> None:
        if self._owner is None:
            job = current_session().reading.job
            self._owner = FolderOwner(self._folder, job="" if job is None else job.value, attempt=own_restart_count())
        self._owner.take()

    def _release(self) -> None:
        if self._owner is not None:
            self._owner.release()


def _together(comm: Comm, part: str, work: Callable[[], T]) -> T:
    """Do the work of this rank, and wait for that of the others: an error on one rank is one on all."""
    with comm.call("Checkpoints", {"part": part}) as call:
        result = work()
        call.verify()
    return result
