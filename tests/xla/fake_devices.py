"""Ranks on the devices of the fake torch_xla: threads of the test's own process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rankwise._session import xla_session

FAKE = str(Path(__file__).parent / "fake")


@contextmanager
def fake_torch_xla(devices: int = 1, **variables: str) -> Iterator[None]:
    """Let `import torch_xla` import the fake, with this many devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FAKE)
        patch.setenv("PJRT_DEVICE", "CPU")
        patch.setenv("CPU_NUM_DEVICES", str(devices))
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            yield
        finally:
            xla_session._stores.clear()  # a process has one number of devices for good, but with the fake
            for name in [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]:
                del sys.modules[name]


def run_ranks(fn: Callable[[], Any]) -> list[Any]:
    """Call a function in a thread for each device, and return the results in the order of the ranks."""
    pjrt = importlib.import_module("torch_xla._internal.pjrt")
    return list(pjrt._run_thread_per_device(0, 1, fn, pjrt.initialize_multiprocess).values())
