"""The simulated device: it refuses what a device refuses, and finds programs that are not in order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankwise as rw

simdev = torch.simdev  # type: ignore[attr-defined]


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import torch\nx = torch.ones(3, device='simdev')\n{program}"]
    environ = os.environ | variables
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("import ctypes; ctypes.string_at(x.data_ptr(), 4)", "killed by a signal"),
        ("x.to('simdev:5')", "invalid device ordinal 5"),
        ("print((x + 1).tolist())", "[2.0, 2.0, 2.0]"),
    ],
)
def test_memory_is_its_own(program: str, end: str) -> None:
    process = run(program)
    assert end in ("killed by a signal" if process.returncode < 0 else process.stdout + process.stderr)


def test_a_fork_cannot_use_it() -> None:
    program = "import os\npid = os.fork()\nif pid == 0: x + 1\nelse: os._exit(os.waitpid(pid, 0)[1] != 0)"
    process = run(program)
    assert "Cannot re-initialize simdev in forked subprocess" in process.stderr
    assert process.returncode == 1


def test_streams_that_do_not_wait_are_found() -> None:
    program = "side = torch.Stream('simdev')\nwith side: y = x + 1\n{wait}\nz = y + 1\nprint(torch.simdev.races())"
    assert run(program.format(wait="")).stdout != "0\n"
    ordered = "side.wait_stream(torch.accelerator.current_stream())"
    waits = "torch.accelerator.current_stream().wait_stream(side)"
    assert run(program.replace("with side", f"{ordered}\nwith side").format(wait=waits)).stdout == "0\n"


@pytest.mark.parametrize("mode", ["", "1"])
def test_torch_alone_is_in_order(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIMDEV_ASYNC", mode)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which DDP makes

    def body() -> list[float]:
        rank = int(os.environ["RANK"])
        device = torch.device("simdev", rank)
        torch.accelerator.set_device_index(rank)
        dist.init_process_group("cpu:gloo,simdev:simccl", device_id=device)
        x = torch.full((3,), rank + 1.0, device=device)
        dist.all_reduce(x)
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x + rank)
        received = torch.empty_like(x)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x * rank, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        ):
            work.wait()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3).to(device))
        model(x + rank).sum().backward()
        gradient = model.module.bias.grad
        assert gradient is not None
        values = [x[0], parts[1][0], received[0], gradient[0]]
        found = [value.item() for value in values]
        dist.destroy_process_group()
        assert (simdev.races(), simdev.contexts()) == (0, [rank])
        return found

    assert rw.launch(body, nproc=2) == [[3, 4, 3, 1], [3, 4, 0, 1]]
