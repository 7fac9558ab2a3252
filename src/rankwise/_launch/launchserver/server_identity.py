"""What a fork of a launch server has from the server, and a new process from its caller: where these differ, the launch
needs another server."""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankwise._launch.interpreter import interpreter_options, search_path

# Variables of the terminal and the shell that a person types in. No import depends on them, and the forked process gets
# those of its caller.
_OF_SHELLS: Final = frozenset({
    *("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TERM", "COLORTERM", "WINDOWID", "DISPLAY", "WAYLAND_DISPLAY"),
    *("TMUX", "TMUX_PANE", "STY", "WINDOW", "XAUTHORITY", "XDG_SESSION_ID", "INVOCATION_ID", "JOURNAL_STREAM"),
    *("TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TERM_SESSION_ID", "VTE_VERSION", "WT_SESSION", "ITERM_SESSION_ID"),
    *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "SSH_AGENT_PID", "GPG_TTY", "HISTCMD", "PS1"),
    *("PYTEST_CURRENT_TEST", "PYTEST_VERSION"),
})  # fmt: skip
# Lines of /proc/self/status: capabilities, seccomp, and the namespace's own process ids.
_STATUS_LINES: Final = ("Cap", "NoNewPrivs", "Seccomp")
_PROCESS: Final = Path("/proc/self")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """The state of a launch server that forks of it cannot change.

    Attributes:
        environ: The environment in which it imports modules.
        modules: The modules that it imports after torch.
        prepare: The function that it calls before it serves, as "module:function".
    """

    environ: Mapping[str, str]
    modules: Sequence[str]
    prepare: str

    def digest(self) -> str:
        """Return the name of the server: the same for processes whose launches the same server can fork."""
        state = (
            sys.executable, sys.version, sys.prefix, interpreter_options(), search_path(),
            sorted((name, value) for name, value in self.environ.items() if name not in _OF_SHELLS),
            tuple(self.modules), self.prepare,
            _limits(), _scheduling(), _credentials(), _confinement(),
        )  # fmt: skip
        return hashlib.sha256(repr(state).encode(errors="surrogateescape")).hexdigest()[:20]


def _limits() -> list[tuple[str, tuple[int, int]]]:
    names = sorted(name for name in vars(resource) if name.startswith("RLIMIT_"))
    return [(name, resource.getrlimit(getattr(resource, name))) for name in names]


def _scheduling() -> tuple[object, ...]:
    cores = sorted(os.sched_getaffinity(0))
    return cores, os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), _read("oom_score_adj")


def _credentials() -> tuple[object, ...]:
    return os.getresuid(), os.getresgid(), sorted(os.getgroups())


def _confinement() -> tuple[object, ...]:
    """Return the control group, the namespaces, the root folder and the rights of this process."""
    spaces = sorted((entry.name, os.readlink(entry)) for entry in (_PROCESS / "ns").iterdir())  # noqa: PTH115 - no paths
    root = Path("/").stat()
    rights = [line for line in _read("status").splitlines() if line.startswith(_STATUS_LINES)]
    return _read("cgroup"), spaces, (root.st_dev, root.st_ino), rights


def _read(name: str) -> str:
    return (_PROCESS / name).read_text()
