"""The trace of a session: the file in which the calls of this rank are recorded, of rankwise and of torch."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rankwise._comm.comm import Comm
from rankwise._session.environ import process_variables
from rankwise._session.session import SessionState
from rankwise._session.torch_calls import TorchCalls
from rankwise._trace.recording import Recording
from rankwise.errors import InvalidArgumentError

log = logging.getLogger(__name__)

_FOLDER: Final = "RANKWISE_TRACE"
# How long other ranks wait for the name that rank zero gives to the run.
_NAME_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.01


class CallTrace:
    """The trace of one session; without a folder, there is none."""

    def __init__(self, argument: str | os.PathLike[str] | None, environ: Mapping[str, str] | None) -> None:
        """Read the settings.

        Raises:
            InvalidArgumentError: The argument is not a path.
        """
        variables = process_variables() if environ is None else environ
        if argument is not None and not isinstance(argument, (str, os.PathLike)):
            raise InvalidArgumentError(f"trace={argument!r} is not a path of a folder")
        folder = variables.get(_FOLDER, "") if argument is None else os.fspath(argument)
        self._folder = Path(folder).absolute() if folder else None
        self._comm: Comm | None = None
        self._calls: TorchCalls | None = None

    def start(self, session: SessionState) -> None:
        """Begin to record; without a trace if the file cannot be made, with a warning."""
        if self._folder is None or session.world_size == 1:
            return
        try:
            run = self._folder / _name_of_run(session.comm, session.rank)
            recording = Recording(run, rank=session.rank, world_size=session.world_size)
        except (OSError, RuntimeError) as error:  # the latter of torch's store, if rank zero has ended
            log.warning("rank %d is not traced: %s; see %s", session.rank, error, _FOLDER)
            return
        self._comm = session.comm
        self._calls = TorchCalls(recording)
        self._comm.record_calls(self._calls)

    def stop(self) -> None:
        """Record nothing more."""
        comm, calls, self._comm, self._calls = self._comm, self._calls, None, None
        if comm is not None and calls is not None:
            comm.record_calls(None)
            calls.close()


def _name_of_run(comm: Comm, rank: int) -> str:
    """Return the name of this run, of which rank zero tells the others; one of this rank alone if it does not."""
    store = comm.shared_store()
    own = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{secrets.token_hex(2)}"
    if store is None:
        return own
    if rank == 0:
        store.set("trace", own)
        return own
    deadline = time.monotonic() + _NAME_SECONDS
    while not store.check(["trace"]):
        if time.monotonic() > deadline:
            log.warning("rank zero is not traced; set %s for all ranks", _FOLDER)
            return own
        time.sleep(_POLL_SECONDS)
    return store.get("trace").decode()
