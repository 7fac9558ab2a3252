"""What works without the modules, functions and signals of POSIX systems, as on Windows; here they are hidden."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import select
import signal
import socket
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

# They, and torch, are loaded as on this platform.
for package in ("cloudpickle", "optree", "psutil", "torch.distributed", "torch.distributed.nn.functional"):
    importlib.import_module(package)
sysconfig.get_config_vars()
usual = importlib.util.find_spec
HIDDEN = ("fcntl", "termios", "resource", "pwd", "grp", "tty", "pty")


def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name in HIDDEN else usual(name, package)


vars(importlib.util)["find_spec"] = find_spec
for module in HIDDEN:
    vars(sys)["modules"][module] = None
for home, names in (
    (
        os,
        "fork register_at_fork getuid geteuid sched_getaffinity pidfd_open eventfd getpgid setsid sysconf",
    ),
    (
        signal,
        "SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGCHLD SIGRTMIN SIGRTMAX SIGSTOP SIGPIPE pthread_sigmask",
    ),
    (socket, "AF_UNIX SCM_RIGHTS SO_PEERCRED MSG_CMSG_CLOEXEC sendmsg recvmsg send_fds recv_fds"),
    (select, "epoll poll"),
):
    for name in names.split():
        vars(home).pop(name, None)
sys.platform = "win32"

import rankwise as rw  # noqa: E402 - when they are hidden

for dropin in ("ignite", "mmcv", "virtex", "vis4d"):
    importlib.import_module(f"rankwise.compat.{dropin}")
print(rw.get_rank(), rw.get_world_size(), rw.is_rank_zero(), rw.detect({"RANK": "1", "WORLD_SIZE": "2"}).rank.value)
with rw.init():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    rw.sync_grads(model)
    with rw.Stop() as stop:
        print("stop", stop.agreed())
    print(rw.all_reduce(torch.ones(2)).tolist(), rw.all_gather({"a": 1}), rw.broadcast("x"), rw.topology().num_nodes)
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
for start in (
    rw.init,
    lambda: rw.launch(print),
    lambda: importlib.import_module("rankwise.launching"),
    lambda: importlib.import_module("rankwise.extend.engines"),
):
    try:
        start()
    except rw.MissingDependencyError as error:
        print(error)
from rankwise.cli.main import main  # noqa: E402 - as above

for command in ("doctor", "logs folder"):
    print(CliRunner().invoke(main, command.split()).output, end="")
TESTS = str(Path(__file__).parents[2] / "testing" / "programs" / "needs_torch.py")
for selected in ("alone", "ranks"):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        pytest.main(["-s", "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest", TESTS, "-k", selected])
    print(output.getvalue().strip().splitlines()[-1].strip("= "))
