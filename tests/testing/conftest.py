"""Fixtures for tests of the plugin."""

from __future__ import annotations

from typing import Final

import pytest

# Installed for `test_plugins.py`; most projects do not have them.
OTHER_PLUGINS: Final = ("asyncio", "pytest_mock", "randomly", "rerunfailures", "syrupy")


@pytest.fixture
def programs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project in a temporary folder, to which `run` adds tests."""
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-pno:{name}" for name in OTHER_PLUGINS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return pytester
