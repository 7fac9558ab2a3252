"""What tests of the plugin stand on."""

from __future__ import annotations

import pytest


@pytest.fixture
def programs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of its own, to which `run` adds tests."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return pytester
