"""The watch over hangs while a session is open: a process for the ranks of a host, started by the first of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rankwise._arguments import as_seconds
from rankwise._diagnose.jobs import WATCHER
from rankwise._diagnose.stack_file import offer_stacks
from rankwise._environment.facts import LaunchEnvironment
from rankwise._session.environ import process_variables
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError

_SECONDS: Final = "RANKWISE_HANG_SECONDS"
_FOLDER: Final = "RANKWISE_HANG_DIR"
# Without the working folder, whose files may have the names of modules. The rank may have found rankwise by `sys.path`.
_CODE: Final = f"import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[4]]; from {WATCHER} import main; main()"
_PACKAGES: Final = str(Path(__file__).parents[2])


class HangWatch:
    """The watch of one session.

    Attributes:
        seconds: How long a collective waits before it is reported; 0 if there is no watch.
    """

    def __init__(self, argument: float | None, environ: Mapping[str, str] | None) -> None:
        """Read the settings.

        Raises:
            InvalidArgumentError: The argument is not a duration.
            LauncherEnvironmentError: The variable is not.
        """
        variables = process_variables() if environ is None else environ
        self.seconds = _seconds(variables.get(_SECONDS, "").strip() if argument is None else argument)
        self._folder = variables.get(_FOLDER, "")
        self._withdraw: Callable[[], None] = lambda: None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()

    def start(self, reading: LaunchEnvironment) -> None:
        """Begin to watch: the first rank of each host starts the process."""
        if not self.seconds or reading.world_size.value == 1 or sys.platform != "linux":
            return
        rank, local_rank = reading.rank.value, reading.local_rank
        local = rank if local_rank is None else local_rank.value
        self._withdraw = offer_stacks(rank=rank, world_size=reading.world_size.value, local_rank=local)
        if local == 0:
            arguments = [str(os.getpid()), str(self.seconds), self._folder, _PACKAGES]
            with contextlib.suppress(OSError):  # no process is left for it; the ranks can do without
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                    [sys.executable, "-c", _CODE, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is not meant for it
                )

    def stop(self) -> None:
        """End the watch."""
        if self._pid != os.getpid():
            return
        self._withdraw()
        self._withdraw = lambda: None
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.kill()  # it has no state, and may be reading stacks
            process.stdin.close()
            process.wait()


def _seconds(value: object) -> float:
    if value in {"", 0}:
        return 0.0
    if not isinstance(value, str):
        return as_seconds(value, "hang_report", most=float(1 << 31))
    try:
        number = float(value)
        return number and as_seconds(number, _SECONDS, most=float(1 << 31))
    except (ValueError, InvalidArgumentError):
        raise LauncherEnvironmentError(
            f"{_SECONDS}={value!r} is not a number of seconds; 0, or no value, is for no reports of hangs"
        ) from None
