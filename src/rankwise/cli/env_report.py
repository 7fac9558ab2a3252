"""The facts that `rankwise env` shows about one process: each with its value and its source. It does not import torch.

A section is a dictionary of rows, in the order in which they are shown. Every source of rows is a function of its own.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rankwise._comm.control.page.futex import has_futex
from rankwise._environment.candidates import candidates
from rankwise._environment.facts import OVERRIDE_PREFIX, OVERRIDES, TOPOLOGY_FIELDS, Environ, Fact, LaunchEnvironment
from rankwise._environment.nesting import OUTER, RUN
from rankwise._launch.output.line_prefix import HAS_PREFIX
from rankwise._launch.reported_steps import PROGRESS
from rankwise._net.host import launching_process
from rankwise._net.job_secret import SECRET, SECRET_FILE, code
from rankwise._rendezvous.endpoint import Endpoint, choose
from rankwise._rendezvous.mpi import has_mpi4py, needs_mpi
from rankwise._session.environ import read_shared_memory, with_first_host, xla_facts
from rankwise.errors import LauncherEnvironmentError

# The variables of rankwise, those that it sets in its ranks included.
OWN_VARIABLES: Final = (
    *OVERRIDES,
    *(
        "RANKWISE_CHECK",
        "RANKWISE_SHARED_MEMORY",
        "RANKWISE_PRELOAD",
        "RANKWISE_SSH",
        "RANKWISE_HANG_SECONDS",
        "RANKWISE_HANG_DIR",
        "RANKWISE_TRACE",
        "RANKWISE_LAUNCH",
        SECRET,
        SECRET_FILE,
        HAS_PREFIX,
        PROGRESS,
        RUN,
        OUTER,
    ),
)
# The variables by which a scheduler or a user limits the devices of a process.
_VISIBLE_DEVICES: Final = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A value, and its source; the value is None if it is not known, and the source is then the reason."""

    value: int | str | None
    source: str


Section = dict[str, Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The facts about one process.

    Attributes:
        reading: Its launch environment.
        sections: The rows, by section and name.
        warnings: Messages for the user.
    """

    reading: LaunchEnvironment
    sections: dict[str, Section]
    warnings: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the facts as an object for JSON."""
        rows = {
            section: {name: asdict(row) for name, row in rows.items()}
            for section, rows in self.sections.items()
            if section not in {"launcher", "topology"}
        }
        facts = {name: None if fact is None else asdict(fact) for name, fact in self.reading.facts().items()}
        launcher = self.sections["launcher"]["launcher"]
        return {
            "launcher": launcher.value,
            "reason": launcher.source,
            "facts": facts,
            **rows,
            "warnings": list(self.warnings),
        }


def report_on(reading: LaunchEnvironment, environ: Environ, launcher: str) -> Report:
    """Return the report on this process."""
    warnings = list(reading.warnings)
    reason = next(one.reason for one in candidates(environ, launcher) if one.chosen)
    torch = _torch_versions()
    sections = {
        "launcher": {"launcher": Row(reading.launcher, reason)},
        "topology": {name: _row(getattr(reading, name), "not known before init()") for name in TOPOLOGY_FIELDS},
        "rendezvous": {
            "address": _address(reading, warnings),
            "job": _row(reading.job, "not set"),
        },
        "devices": _devices(environ) | {name: Row(fact.value, fact.source) for name, fact in xla_facts().items()},
        "software": {
            **_torch(torch),
            "python": Row(platform.python_version(), sys.executable or "unknown"),
            "rankwise": _rankwise(),
        },
        "host": {"hostname": Row(socket.gethostname(), "gethostname()"), "shared_memory": _shared_memory(environ)},
        "variables": _variables(environ, warnings),
    }
    gpus = sections["devices"]["nvidia_gpus"].value
    if gpus and torch.get("__version__") and not torch.get("cuda"):
        warnings.append(f"this host has {gpus} NVIDIA GPUs, but torch {torch['__version__']} is built without CUDA")
    return Report(reading=reading, sections=sections, warnings=tuple(warnings))


def _row(fact: Fact[int] | Fact[str] | None, otherwise: str) -> Row:
    return Row(None, otherwise) if fact is None else Row(fact.value, fact.source)


def _shared_memory(environ: Environ) -> Row:
    """Return whether tensors of the ranks of this host may move through memory that they share."""
    if not has_futex() or not hasattr(os, "eventfd"):
        return Row("off", "this system has no futex, or Python does not have its eventfd")
    if "RANKWISE_SHARED_MEMORY" in environ:
        return Row("on" if read_shared_memory(environ) else "off", "RANKWISE_SHARED_MEMORY")
    return Row("on", "if all ranks of the host agree in init()")


def endpoint_of(reading: LaunchEnvironment) -> Endpoint | None:
    """Return where the ranks would meet in `init()`; None for a world of one without an address.

    Raises:
        LauncherEnvironmentError: The address is not set, and cannot be derived.
    """
    return choose(with_first_host(reading), launching_process=launching_process)


def _address(reading: LaunchEnvironment, warnings: list[str]) -> Row:
    """Return the address where the ranks would meet in `init()`."""
    if needs_mpi(reading) and has_mpi4py():
        return Row(None, "an address of rank zero, which init() asks for through mpi4py")
    try:
        endpoint = endpoint_of(reading)
    except LauncherEnvironmentError as error:
        warnings.append(f"rankwise.init() would raise: {error}")
        return Row(None, "not set")
    if endpoint is None:
        return Row(None, "a world of one needs none")
    source = endpoint.source
    if endpoint.agent_store:
        source += ", where the launcher serves a store"
    if len(endpoint.ports) > 1:
        source += f"; {len(endpoint.ports) - 1} other ports if this one is taken"
    return Row(f"{endpoint.host}:{endpoint.ports[0]}", source)


def _devices(environ: Environ) -> Section:
    """Return the GPUs of this host, from its device files, and the variables that limit which are visible."""
    gpus = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", path.name)]
    rows = {"nvidia_gpus": Row(len(gpus), "/dev/nvidia[0-9]*")}
    return rows | {name: Row(environ[name], "the environment") for name in _VISIBLE_DEVICES if name in environ}


def _torch_versions() -> dict[str, str | None]:
    """Return the versions that the torch which would be imported was built with; empty if there is no torch.

    They are read from its file of versions: to import torch takes seconds, and initializes libraries of the device.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return {}
    path = Path(found.origin).with_name("version.py")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return {"__version__": "unknown", "path": str(path.parent)}
    versions = dict(re.findall(r"^(\w+)(?:: [^=]*)? = '([^']*)'$", text, re.MULTILINE))
    return {"__version__": "unknown", **versions, "path": str(path.parent)}


def _torch(versions: Mapping[str, str | None]) -> Section:
    if not versions:
        return {"torch": Row(None, "not installed: python -m pip install torch")}
    rows = {"torch": Row(versions["__version__"], versions["path"] or "")}
    if versions.get("hip"):
        rows["hip"] = Row(versions["hip"] or "", "the build of torch")
    cuda = versions.get("cuda")
    rows["cuda"] = Row(cuda, "the build of torch") if cuda else Row(None, "torch is built without CUDA")
    if cuda:
        rows["nccl"] = _nccl(cuda)
    return rows


def _rankwise() -> Row:
    folder = str(Path(__file__).parents[1])
    try:
        return Row(metadata.version("rankwise"), folder)
    except metadata.PackageNotFoundError:  # a copied folder
        return Row("unknown", folder)


def _nccl(cuda: str) -> Row:
    package = f"nvidia-nccl-cu{cuda.partition('.')[0]}"
    try:
        return Row(metadata.version(package), f"the package {package}")
    except metadata.PackageNotFoundError:
        return Row(None, "part of torch: torch.cuda.nccl.version()")


def _hidden(secret: str) -> Row:
    """Return what may be shown of a secret: enough to see whether two hosts have the same."""
    digest = code(secret.encode(errors="surrogateescape"), "comparison")[:4].hex() if secret else "empty"
    return Row(f"set ({len(secret)} characters)", f"the environment, digest {digest}")


def _variables(environ: Environ, warnings: list[str]) -> Section:
    """Return the variables of rankwise that are set; one that rankwise does not read adds a warning."""
    rows: Section = {}
    for name in sorted(environ):
        if name.startswith(OVERRIDE_PREFIX):
            rows[name] = _hidden(environ[name]) if name == SECRET else Row(environ[name], "the environment")
            if name not in OWN_VARIABLES:
                known = [own.removeprefix(OVERRIDE_PREFIX) for own in OWN_VARIABLES]
                close = difflib.get_close_matches(name.removeprefix(OVERRIDE_PREFIX), known, n=1)
                hint = f"; did you mean {OVERRIDE_PREFIX}{close[0]}?" if close else ""
                warnings.append(f"{name} is set, but rankwise does not read a variable of that name{hint}")
    return rows
