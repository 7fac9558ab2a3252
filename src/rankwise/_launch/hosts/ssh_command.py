"""How the watchdog of a host is started: by the system's ssh, or directly on this host; and why it could not be."""

from __future__ import annotations

import re
import shlex
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rankwise._arguments import as_text
from rankwise._launch.interpreter import interpreter_command
from rankwise.errors import InvalidArgumentError, LaunchError, printable, shown

# The command that stands for ssh, with options of its own.
SSH_VARIABLE: Final = "RANKWISE_SSH"
DEFAULT_SSH: Final = "ssh"

# For each option ssh takes the first value that it finds: those of the user's command come before. Nobody can answer
# a question of several ssh at once. A connection without answers for 20 s is lost. A forwarded port can be open once.
_OPTIONS: Final = (
    *("-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"),
    *("-o", "ClearAllForwardings=yes", "-o", "ControlMaster=no"),
)
_SSH_FAILED: Final = 255
_SIGNALLED: Final = 128
_NOT_EXECUTABLE: Final = 126
_NOT_FOUND: Final = 127
_LONGEST_TEXT: Final = 2_000
# What ssh prints, and what to do.
_REMEDIES: Final = (
    ("could not resolve hostname", "is it spelled as in DNS, /etc/hosts or the configuration of ssh?"),
    ("host key verification failed", "connect once by hand to see its key, and accept it if it is the right one"),
    ("permission denied", "ssh has to log in without a password: copy a key with ssh-copy-id, or start ssh-agent"),
    ("too many authentication failures", "name one key for the host in the configuration of ssh (IdentitiesOnly)"),
    ("connection refused", "does sshd run there, and on that port?"),
    ("timed out", "is the host up, and does no firewall drop the connection?"),
    ("network is unreachable", "is the host up, and the network between?"),
    ("no route to host", "is the host up, and the network between?"),
)


@dataclass(frozen=True, slots=True)
class HostCommand:
    """How to start the watchdog of a host.

    Attributes:
        name: The host, as the user has named it: "gpu-01", "user@gpu-01", an alias, or "localhost".
        ssh: The command that stands for ssh.
    """

    name: str
    ssh: tuple[str, ...]

    @property
    def program(self) -> str:
        """The program that starts it."""
        return "ssh"

    @property
    def is_local(self) -> bool:
        """It is this host, which needs no ssh."""
        own = socket.gethostname()
        return self.name in {"localhost", own, own.partition(".")[0]}

    def argv(self) -> list[str]:
        """Return the command. Nothing in it is a secret.

        Raises:
            LaunchError: There is no interpreter to start.
        """
        watchdog = [word.rstrip() for word in interpreter_command("other_hosts.watchdog")]
        if self.is_local:
            return watchdog
        return [*self.ssh, *_OPTIONS, "--", self.name, f"exec {shlex.join(watchdog)}"]

    def explain_start(self, status: int, printed: str) -> LaunchError:
        """Return the error of a watchdog that did not start.

        Args:
            status: The exit status of ssh; negative for a signal.
            printed: What was printed on standard error.
        """
        interpreter = interpreter_command("other_hosts.watchdog")[0]
        text = _readable(printed)[-_LONGEST_TEXT:]
        last = text.splitlines()[-1] if text else ""
        missing = re.search(r"No module named '(rankwise[\w.]*)'", text)
        if missing is not None and missing[1] == "rankwise":
            why = f"rankwise is not installed for {interpreter} there; install the version that this launcher has"
        elif missing is not None or re.search(r"cannot import name .* from 'rankwise", text):
            why = f"{interpreter} has another version of rankwise there; install the one that this launcher has"
        elif status in {_NOT_FOUND, _NOT_EXECUTABLE}:
            why = (
                f"the interpreter {interpreter} cannot be started there ({last}); hosts need the same one at the same "
                "path, such as that of a virtual environment on a file system that all of them share"
            )
        elif status == _SSH_FAILED and not self.is_local:
            remedy = next((remedy for sign, remedy in _REMEDIES if sign in text.lower()), "")
            lines = "\n".join(f"  {line}" for line in text.splitlines()) or "  (ssh has printed nothing)"
            why = f"ssh cannot connect to it{f'; {remedy}' if remedy else ''}\n{lines}"
        else:
            how = f"{_ended(status)} before it could answer: {text or 'no output'}"
            why = f"the process that {self.program} starts there {how}"
        return LaunchError(f"host {self.name} cannot be used: {why}")

    def explain_loss(self, status: int | None, printed: str) -> str:
        """Return why a host that had started is lost.

        Args:
            status: The exit status of ssh; negative for a signal; None if it runs.
            printed: What was printed on standard error last.
        """
        text = _readable(printed).splitlines()
        last = f": {text[-1]}" if text and status == _SSH_FAILED else ""
        if self.is_local:
            how = f"its launcher {'has closed its output' if status is None else _ended(status)}"
        elif status is not None and (status == _SSH_FAILED or status < 0):
            how = f"the connection to it is lost: {self.program} {_ended(status)}{last}"
        else:
            end = "has closed its output" if status is None else _ended(status)
            how = f"its launcher {end}, and has reported nothing"
        return f"host {self.name} is lost: {how}"

    def explain_stop(self, by: str) -> str:
        """Return why a launcher has stopped by a signal that this terminal has not sent."""
        return (
            f"its launcher was stopped by {by}, and not from this terminal: a process on that host has sent the signal"
        )


def host_commands(hosts: Sequence[str], ssh: str) -> list[HostCommand]:
    """Return how to start the watchdogs of several hosts, in their order.

    Raises:
        InvalidArgumentError: They are not names of different hosts, or `ssh` is no command.
    """
    if isinstance(hosts, (str, bytes)) or not isinstance(hosts, Sequence) or not hosts:
        raise InvalidArgumentError(
            f"hosts={shown(hosts)} is not a list of names of hosts, such as ['gpu-01', 'gpu-02']"
        )
    try:
        command = tuple(shlex.split(as_text(ssh, "ssh")))
    except ValueError as error:
        raise InvalidArgumentError(f"the command for ssh, {ssh!r}, cannot be read: {error}") from error
    if not command:
        raise InvalidArgumentError("the command for ssh is empty")
    for at, name in enumerate(hosts):
        text = as_text(name, "the name of a host")
        if not text or text.startswith("-") or any(one.isspace() or not one.isprintable() for one in text):
            raise InvalidArgumentError(f"{text!r} is not the name of a host, such as gpu-01 or user@gpu-01")
        if text in hosts[:at]:
            raise InvalidArgumentError(
                f"host {text} is named twice, and each host has one launcher with all of its ranks"
            )
    return [HostCommand(name, command) for name in hosts]


def _readable(printed: str) -> str:
    """Return what was printed, without the carriage returns with which ssh ends its lines."""
    return printable("\n".join(line.rstrip() for line in printed.strip().splitlines()))


def _ended(status: int) -> str:
    """Return how a process has ended; shells report signal N as exit status 128 + N."""
    number = -status if status < 0 else status - _SIGNALLED
    name = signal.Signals(number).name if number in set(signal.Signals) else ""
    if status < 0 or name:
        return f"was killed by {name or f'signal {number}'}"
    return f"has ended with exit status {status}"
