"""Tests that leave something behind, and after each one that would find it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankwise as rw

pytestmark = pytest.mark.ranks(2)

HERE = Path.cwd()
COUNT = 0
KEPT: list[object] = []


def leave_environment() -> None:
    os.environ["LEFT"] = "1"


def leave_directory() -> None:
    os.chdir("/")


def leave_stream_closed() -> None:
    sys.stdout.close()


def leave_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def leave_device() -> None:
    torch.set_default_device("meta")


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(100,), daemon=True, name="left").start()


def leave_group() -> None:
    dist.init_process_group("gloo")


def leave_session() -> None:
    KEPT.append(rw.init())


def leave_patch() -> None:
    time.monotonic = lambda: 0.0


def leave_variable() -> None:
    global COUNT  # noqa: PLW0603 - that is the leak
    COUNT += 1


def leave_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    KEPT.append(child)
    (HERE / f"child{os.environ['RANK']}").write_text(str(child.pid))


def leave_handler() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def leave_gradients_off() -> None:
    torch.set_grad_enabled(False)


LEAKS = [value for name, value in list(globals().items()) if name.startswith("leave_")]


@pytest.mark.parametrize("leave", LEAKS)
def test_leaves(leave: object) -> None:
    assert "LEFT" not in os.environ
    assert Path.cwd() == HERE
    assert torch.tensor(1.0).dtype == torch.float32
    assert torch.ones(1).device == torch.device("cpu")
    assert torch.is_grad_enabled()
    assert not dist.is_initialized()
    assert time.monotonic() > 0
    assert COUNT == 0
    assert not KEPT
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert callable(leave)
    leave()


def test_nothing_is_left() -> None:
    assert COUNT == 0
