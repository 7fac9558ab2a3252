"""The pytest plugin: `@pytest.mark.ranks("serial", 1, 2, 4)` runs a test alone and as the ranks of worlds.

"serial" is pytest's own process with nothing joined. A number is that many processes, each of which runs the test with
its fixtures, as pytest does. Pytest loads this module in every project, so torch is imported only for tests in ranks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest

from rankwise._dependencies import require_torch
from rankwise.errors import InvalidArgumentError
from rankwise.testing._plugin.marker import PARAMETER, SERIAL, read_marker, size_id, world_size_of
from rankwise.testing._plugin.timeouts import TEST_SECONDS

if TYPE_CHECKING:
    from rankwise._session.session import Session

_MARKER: Final = (
    "ranks(*sizes, backend=None, timeout=60, device='cpu'): run the test as the ranks of a world of each size; "
    '"serial" is this process with nothing joined.'
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rankwise", "tests that run as the ranks of a world")
    group.addoption(
        "--ranks-fresh",
        action="store_true",
        help="start new processes for every test, instead of keeping those that a test has left clean",
    )
    seconds = f"{TEST_SECONDS:g}"
    parser.addini("ranks_timeout", f"time limit of a test in a world in seconds, {seconds} by default", default=seconds)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    if not _is_rank(config):
        from rankwise.testing._plugin.scheduler import Scheduler  # noqa: PLC0415 - ranks do not need it

        config.pluginmanager.register(Scheduler(config), "rankwise-scheduler")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = None
    with contextlib.suppress(InvalidArgumentError):  # reported when the test is to run, and for that test alone
        marker = read_marker(metafunc.definition)
    if marker is not None and len(marker.sizes) > 1:
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, marker.sizes, ids=size_id, indirect=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    is_rank = _is_rank(item.config)
    marker = read_marker(item) if is_rank or world_size_of(item) == SERIAL else None
    if marker is not None and marker.may_be_unavailable:
        from rankwise.testing._plugin.fixtures import select_device  # noqa: PLC0415 - imports torch

        select_device(marker, is_rank=is_rank)


@pytest.fixture(name=PARAMETER)
def _size(request: pytest.FixtureRequest) -> int | str:
    """The size of the world that this test runs in, or "serial"."""
    return world_size_of(request.node)


@pytest.fixture
def _rankwise_session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The session that `session` and `world` return."""
    require_torch("the fixture `session` (or `world`)")
    from rankwise.testing._plugin.fixtures import joined_session, serial_session  # noqa: PLC0415 - imports torch

    with joined_session(request.node) if _is_rank(request.config) else serial_session(request.node) as session:
        yield session


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Session:
    """The session of this process in the test's world, as `rankwise.init()` returns it.

    In a world of ranks it has a process group, of this test alone. In the serial one nothing is joined.
    """
    # Many projects have a `session` of another kind. Their own fixtures override this one. That of another plugin does
    # so only if it was loaded later; if it was loaded earlier, this fixture overrides it, and returns its value.
    try:
        other: Session = request.getfixturevalue("session")
    except pytest.FixtureLookupError as error:
        if error.argname != "session":
            raise
        own: Session = request.getfixturevalue("_rankwise_session")
        return own
    return other


@pytest.fixture
def world(_rankwise_session: Session) -> Session:
    """The same object as `session`: that fixture's first name."""
    return _rankwise_session


def _is_rank(config: pytest.Config) -> bool:
    rank_session = sys.modules.get("rankwise.testing._plugin.rank_session")
    return rank_session is not None and config.pluginmanager.has_plugin(rank_session.PLUGIN)
