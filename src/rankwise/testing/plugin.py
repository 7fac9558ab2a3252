"""The pytest plugin: `@pytest.mark.ranks("serial", 1, 2, 4)` runs one test body alone and in worlds of these sizes.

"serial" is this process with nothing joined; a number is that many new processes, joined over loopback as `rankwise
launch` would join them. The body gets the comm of its world as `comm`, and what fixtures give it, pickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

SERIAL = "serial"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        'ranks(*sizes): run the test in a world of each size; "serial" is this process with nothing joined.',
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None:
        if "world" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world")
        metafunc.parametrize("world", marker.args or (2,), ids=str, indirect=True)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> int | str:
    """The size of the world that this test runs in, or "serial"."""
    size: int | str = request.param
    return size


@pytest.fixture
def comm(world: int | str) -> Iterator[Any]:
    """The comm of the world that this test runs in."""
    if world != SERIAL:
        yield None  # each rank puts its own in place
        return
    from rankwise.session.current import forget, session_in_force  # noqa: PLC0415 - pytest loads every plugin

    forget()
    yield session_in_force().comm
    forget()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    size = pyfuncitem.funcargs.get("world")
    if pyfuncitem.get_closest_marker("ranks") is None or size == SERIAL or not isinstance(size, int):
        return None
    from rankwise.testing.ranks import run_in_ranks  # noqa: PLC0415 - pytest loads every plugin

    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}  # noqa: SLF001
    failure = run_in_ranks(pyfuncitem.obj, arguments, size=size, name=pyfuncitem.nodeid)
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def pytest_report_header() -> str:
    return f"rankwise: worlds on {os.cpu_count()} cores"
