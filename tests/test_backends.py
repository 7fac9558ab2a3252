"""Backend configurations: torch's strings, and what they hold."""

from __future__ import annotations

import pytest

from rankwise._backends import BackendConfig


@pytest.mark.parametrize(
    ("text", "backends", "of_cpu", "of_cuda"),
    [
        ("gloo", ("gloo",), "gloo", "gloo"),
        ("cpu:gloo,cuda:nccl", ("gloo", "nccl"), "gloo", "nccl"),
        ("cuda:NCCL", ("nccl",), None, "nccl"),
        ("", ("",), "", ""),
    ],
)
def test_each_device_type_has_its_backend(
    text: str, backends: tuple[str, ...], of_cpu: str | None, of_cuda: str | None
) -> None:
    config = BackendConfig.parse(text)
    assert config.backends == backends
    assert (config.backend_for("cpu"), config.backend_for("cuda")) == (of_cpu, of_cuda)
    assert str(config) == text.lower()
