"""The pytest plugin: `@pytest.mark.ranks("serial", 1, 2, 4)` runs a test alone and as the ranks of worlds.

"serial" is pytest's own process with nothing joined. A number is that many processes, each of which runs the test with
its fixtures, as pytest does. Pytest loads this in every project, so torch is imported where a test asks for ranks.
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

if TYPE_CHECKING:
    from rankwise._session.session import Session

_MARKER: Final = (
    "ranks(*sizes, backend=None, timeout=60, device='cpu'): run the test as the ranks of a world of each size; "
    '"serial" is this process with nothing joined.'
)
_SECONDS: Final = 60


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rankwise", "tests that run as the ranks of a world")
    group.addoption(
        "--ranks-fresh",
        action="store_true",
        help="start new processes for every test, instead of keeping those that a test has left clean",
    )
    parser.addini("ranks_timeout", f"seconds for a test in a world, {_SECONDS} by default", default=str(_SECONDS))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    if not _is_rank(config):
        from rankwise.testing._plugin.scheduler import Scheduler  # noqa: PLC0415 - ranks do not need it

        config.pluginmanager.register(Scheduler(config), "rankwise-scheduler")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    ranks = None
    with contextlib.suppress(InvalidArgumentError):  # with which the test will fail, and no other
        ranks = read_marker(metafunc.definition)
    if ranks is not None and len(ranks.sizes) > 1:
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, ranks.sizes, ids=size_id, indirect=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    is_rank = _is_rank(item.config)
    ranks = read_marker(item) if is_rank or world_size_of(item) == SERIAL else None
    if ranks is not None and ranks.wants_more_than_the_cpu:
        from rankwise.testing._plugin.fixtures import select_device  # noqa: PLC0415 - imports torch

        select_device(ranks, is_rank=is_rank)


@pytest.fixture(name=PARAMETER)
def _size(request: pytest.FixtureRequest) -> int | str:
    """The size of the world that this test runs in, or "serial"."""
    return world_size_of(request.node)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[Session]:
    """This process as a member of the test's world: what `rankwise.init()` returns, joined and in force.

    In a world of ranks there is a process group, of this test alone. In the serial one nothing is joined.
    """
    require_torch("the fixture `world`")
    from rankwise.testing._plugin.fixtures import joined_session, serial_session  # noqa: PLC0415 - imports torch

    with joined_session(request.node) if _is_rank(request.config) else serial_session(request.node) as session:
        yield session


def _is_rank(config: pytest.Config) -> bool:
    rank = sys.modules.get("rankwise.testing._plugin.rank_session")
    return rank is not None and config.pluginmanager.has_plugin(rank.PLUGIN)
