"""The variables of this process, and the files that they name: the only module that reads `os.environ`.

Ranks of torch_xla have none.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from rankwise._environment.detect import detect
from rankwise._environment.facts import Fact, HostFile, LaunchEnvironment, count_restarts, read_int, read_text
from rankwise._net.job_secret import JobSecret, find_secret
from rankwise._xla_use import is_used
from rankwise.errors import LauncherEnvironmentError

log = logging.getLogger(__name__)

# No name that a resolver takes is longer, and a line has no more than a name and a few numbers.
_LONGEST_LINE: Final = 1000


def process_variables() -> Mapping[str, str]:
    """Return the variables of this process.

    Local.
    """
    return os.environ


def own_environment() -> LaunchEnvironment:
    """Read the launch environment of this process, or of this thread if it is a rank itself.

    Local.

    Raises:
        LauncherEnvironmentError: The variables are incomplete, contradictory or unreadable; or there are none, but
            torch_xla connects several processes.
    """
    if not is_used():
        return detect(os.environ)
    from rankwise._torch_xla import require_alone  # noqa: PLC0415 - not needed without such devices

    reading = _environment_in_torch_xla() or detect(os.environ)
    if reading.launcher == "none":
        require_alone()
    return reading


def own_restart_count() -> int:
    """Return how often the ranks of this job were started again.

    Local.

    Raises:
        LauncherEnvironmentError: A variable is not a whole number.
    """
    return count_restarts(os.environ)


def read_environment(launcher: str = "auto", environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read the launch environment from these variables or as `own_environment`, and log its warnings.

    Local.
    """
    if launcher == "auto" and environ is None:
        reading = own_environment()
    else:
        reading = detect(os.environ if environ is None else environ, launcher)
    for warning in reading.warnings:
        log.warning("%s", warning)
    return reading


def _environment_in_torch_xla() -> LaunchEnvironment | None:
    """Return the facts about a rank that torch_xla has started, which no variable has; None for other processes."""
    from rankwise._torch_xla import launched_position  # noqa: PLC0415 - not needed without such devices

    position = launched_position()
    if position is None:
        return None
    runtime = "torch_xla.runtime"
    return LaunchEnvironment(
        launcher="torch_xla",
        rank=Fact(position.rank, f"{runtime}.global_ordinal()"),
        world_size=Fact(position.world_size, f"{runtime}.world_size()"),
        local_rank=Fact(position.local_rank, f"{runtime}.local_ordinal()"),
        local_world_size=Fact(position.local_world_size, f"{runtime}.local_device_count()"),
        node_rank=Fact(position.node_rank, f"{runtime}.host_index()"),
        num_nodes=Fact(position.world_size // position.local_world_size, f"{runtime}.local_device_count()"),
    )


def read_check(environ: Mapping[str, str] | None = None) -> bool:
    """Read RANKWISE_CHECK: whether single tensors on accelerators are checked before they are reduced.

    Local.

    Raises:
        LauncherEnvironmentError: It is neither 0 nor 1.
    """
    return _read_switch("RANKWISE_CHECK", environ, default=True)


def read_secret(*, one_host: bool) -> JobSecret | None:
    """Return the secret of this job: from RANKWISE_SECRET, or a file; None on one host, where ranks need none.

    Local.

    Raises:
        LauncherEnvironmentError: It is too short, or the file is not private.
    """
    return None if one_host else find_secret(os.environ)


def read_shared_memory(environ: Mapping[str, str] | None = None) -> bool:
    """Read RANKWISE_SHARED_MEMORY: whether tensors of ranks of one host may move through memory that they share.

    Local.

    Raises:
        LauncherEnvironmentError: It is neither 0 nor 1.
    """
    return _read_switch("RANKWISE_SHARED_MEMORY", environ, default=True)


def _read_switch(name: str, environ: Mapping[str, str] | None, *, default: bool) -> bool:
    value = (os.environ if environ is None else environ).get(name, "").strip()
    if value not in {"", "0", "1"}:
        raise LauncherEnvironmentError(f"{name}={value!r} is neither 0 nor 1")
    return value == "1" if value else default


def xla_facts() -> dict[str, Fact[int] | Fact[str]]:
    """Return the version of torch_xla, and the kind and number of its devices if variables have them; {} without it.

    Local. Imports torch_xla only to count the TPUs of this host, and starts no device.
    """
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - slow to import

    try:
        facts: dict[str, Fact[int] | Fact[str]] = {"torch_xla": Fact(version("torch_xla"), "the installed package")}
    except PackageNotFoundError:
        return {}
    kind = read_text(os.environ, "PJRT_DEVICE")
    if kind is None:
        return facts
    facts["xla_device"] = kind
    if kind.value == "CPU":
        facts["xla_devices"] = read_int(os.environ, "CPU_NUM_DEVICES") or Fact(1, "no CPU_NUM_DEVICES")
    elif kind.value == "TPU":
        from rankwise._torch_xla import num_local_processes  # noqa: PLC0415 - likewise

        facts["xla_devices"] = Fact(num_local_processes(), "the TPUs of this host")
    return facts


def with_first_host(reading: LaunchEnvironment) -> LaunchEnvironment:
    """Return the environment with the host of rank zero, from the file that a variable names, if nothing else has it.

    Local. Opens the file only where ranks on several hosts have to meet.

    Raises:
        LauncherEnvironmentError: The file cannot be read, or does not have a host where it should.
    """
    file = reading.host_file
    if file is None or reading.host is not None or reading.is_one_host or reading.world_size.value == 1:
        return reading
    return replace(reading, host=Fact(_first_host(file), f"line {file.skipped + 1} of {file.source}"))


def _first_host(file: HostFile) -> str:
    remedy = "set MASTER_ADDR to the host of rank zero, for all ranks"
    try:
        with Path(file.path).open(encoding="utf-8") as lines:
            line = next(islice(iter(lambda: lines.readline(_LONGEST_LINE), ""), file.skipped, None), "")
    except (OSError, ValueError) as error:  # a path with a null byte, or text that is not UTF-8, is a ValueError
        raise LauncherEnvironmentError(f"{file.source}={file.path!r} cannot be read: {error}; {remedy}") from error
    match = re.fullmatch(r"\s*([A-Za-z0-9][A-Za-z0-9._:-]{0,254})(\s+[0-9]+)?\s*", line)
    if match is None:
        raise LauncherEnvironmentError(
            f"line {file.skipped + 1} of {file.source}={file.path!r} is {line.rstrip()[:80]!r}, not a host; {remedy}"
        )
    return match[1]
