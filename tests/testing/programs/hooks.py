"""Hooks as in other plugins: they come first, give values to workers of pytest-xdist, and run tests."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace

import pytest
from _pytest.runner import runtestprotocol

WORKER_VALUES = pytest.StashKey[tuple[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, default=17)
    parser.addoption("--inline-snapshot", default="create")  # as the plugin does, which then writes to tests


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("refused", "run_without_reports", "not_run"):
        config.addinivalue_line("markers", marker)
    given = getattr(config, "workerinput", None)
    if given is not None:
        config.stash[WORKER_VALUES] = (given["word"], given["draws"])


@pytest.fixture
def worker_values(pytestconfig: pytest.Config) -> tuple[str, int]:
    return pytestconfig.stash[WORKER_VALUES]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: SimpleNamespace) -> None:
    node.workerinput["word"] = f"for {node.gateway.id}"
    node.workerinput["draws"] = node.config.getoption("draws")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    if item.get_closest_marker("refused"):
        raise ValueError("refused")
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    yield
    if item.get_closest_marker("refused"):
        raise ValueError("refused again")


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.get_closest_marker("run_without_reports"):
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            item.ihook.pytest_runtest_logreport(report=report)
        return True
    return True if item.get_closest_marker("not_run") else None
