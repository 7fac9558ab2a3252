"""Devices, on hosts that have none: what is visible is said by stand-ins. tests/gpu has the real ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rankwise._session.device import choose_backend, choose_device, device_index
from rankwise.errors import InvalidArgumentError, JoinError


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"),
    [(0, 8, 0), (7, 8, 7), (0, 1, 0), (5, 1, 0)],
)
def test_one_visible_device_is_index_zero(local_rank: int, visible: int, index: int) -> None:
    assert device_index(local_rank, visible) == index


@pytest.mark.parametrize(("local_rank", "visible"), [(2, 2), (9, 8)])
def test_too_few_devices_is_an_error_with_both_numbers(local_rank: int, visible: int) -> None:
    with pytest.raises(JoinError, match=f"local rank {local_rank} has no device: {visible} are visible"):
        device_index(local_rank, visible)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with four CUDA devices, as far as torch.accelerator tells."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
def test_the_accelerator_is_the_default() -> None:
    assert choose_device(3, None) == torch.device("cuda", 3)
    assert choose_device(3, "cuda") == torch.device("cuda", 3)
    assert choose_device(3, "cuda:1") == torch.device("cuda", 1)
    assert choose_device(3, "cpu") == torch.device("cpu")
    with pytest.raises(JoinError):
        choose_device(4, None)
    with pytest.raises(InvalidArgumentError, match="which has cuda"):
        choose_device(0, "xpu")


def test_the_backend_follows_the_device() -> None:
    assert choose_backend(None, torch.device("cpu")) == "gloo"
    assert choose_backend(None, torch.device("mps", 0)) == "gloo"
    assert choose_backend(None, torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert choose_backend("gloo", torch.device("cuda", 0)) == "gloo"


@pytest.mark.parametrize("backend", ["nope", "cpu:nope", "cpu:gloo,cuda:nope", ""])
def test_a_backend_that_is_not_there_is_refused_with_those_that_are(backend: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"not in this build of torch, which has .*gloo"):
        choose_backend(backend, torch.device("cpu"))


def test_a_backend_that_torch_registers_when_it_is_asked_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 and newer do with nccl-legacy, and with backends of installed packages."""
    usual = dist.is_backend_available
    monkeypatch.setattr(dist.Backend, "backend_list", list(dist.Backend.backend_list))
    monkeypatch.setattr(dist.Backend, "backend_capability", dict(dist.Backend.backend_capability))

    def is_backend_available(name: str) -> bool:
        if name == "late":
            dist.Backend.backend_list.append(name)
            dist.Backend.backend_capability[name] = ["cuda"]
        if name == "broken":
            raise RuntimeError("Failed to load the c10d backend entry point: broken")
        return usual(name)

    monkeypatch.setattr(dist, "is_backend_available", is_backend_available)
    assert choose_backend("cpu:gloo,cuda:late", torch.device("cuda", 0)) == "cpu:gloo,cuda:late"
    with pytest.raises(InvalidArgumentError, match="'late' serves cuda, not cpu"):
        choose_backend("late", torch.device("cpu"))
    with pytest.raises(InvalidArgumentError, match="the backend 'broken' failed: Failed to load"):
        choose_backend("broken", torch.device("cpu"))
