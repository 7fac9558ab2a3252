"""A plugin of pytest in whose runs the ranks of a test are threads, one for each device of XLA in this process.

It takes the place of rankwise's own plugin (`-p no:rankwise -p tests.xla.device_ranks`): tests with the marker `ranks`
run from the same bodies, if their sizes include the number of devices. A fixture that needs the session is made on each
rank; all other fixtures are made once, for all of them. `not_applicable` lists the tests that cannot run in threads.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from inspect import isgeneratorfunction
from typing import Any, Final

import pytest
import torch

import rankwise as rw
from rankwise._launch.rank_traceback import is_consequence
from rankwise._session.current import close_current
from rankwise.testing._plugin.marker import PARAMETER, RanksMarker, read_marker
from tests.xla.cpu_devices import run_ranks
from tests.xla.not_applicable import reason_not_to_run

DEVICES: Final = int(os.environ["CPU_NUM_DEVICES"])
# For a call that never returns. The ranks leave before, with an error.
HANG_SECONDS: Final = 200.0
# The devices on which a test makes tensors where it names none.
DEFAULT_DEVICES: Final = ("cpu", "xla")
_DEFAULT_DEVICE: Final = "_default_device"
_PER_RANK: Final = pytest.StashKey[list[Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("ranks_timeout", "time limit of a test in seconds", default="200")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): run the test as the ranks of a world of each size")
    config.addinivalue_line("filterwarnings", "ignore:Use torch_xla:DeprecationWarning")  # torch_xla's, of itself


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let torch_xla set its variables and start its threads before the first test."""
    if session.config.getoption("numprocesses", None) in {None, 0} or hasattr(session.config, "workerinput"):
        assert run_ranks(rank_and_world_size) == [(rank, DEVICES) for rank in range(DEVICES)]


def rank_and_world_size() -> tuple[int, int]:
    """Return those of the calling thread, by torch_xla."""
    import torch_xla.runtime as xr  # noqa: PLC0415 - not in the process that only starts workers

    return xr.global_ordinal(), xr.world_size()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = read_marker(metafunc.definition)
    if marker is None:
        return
    if len(marker.sizes) > 1:
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, [DEVICES], ids=[f"{DEVICES}devices"], indirect=True)
    if "session" in metafunc.fixturenames:
        metafunc.fixturenames.append(_DEFAULT_DEVICE)
        metafunc.parametrize(_DEFAULT_DEVICE, DEFAULT_DEVICES, indirect=True)


def _runs_here(marker: RanksMarker) -> bool:
    """Whether the sizes include the number of devices; a body for several sizes, 3 among them, is one for any above."""
    sizes = set(marker.sizes)
    return DEVICES in sizes or (DEVICES > 3 in sizes and len(sizes) > 1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests in worlds of other sizes, and mark those that cannot run in threads."""
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        marker = read_marker(item)
        (others if marker is not None and not _runs_here(marker) else chosen).append(item)
        reason = None if marker is None else reason_not_to_run(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    items[:] = chosen
    if others:
        config.hook.pytest_deselected(items=others)


@pytest.fixture(name=PARAMETER)
def _size() -> int:
    """The size of the world that this test runs in."""
    return DEVICES


@pytest.fixture(name=_DEFAULT_DEVICE)
def _default(request: pytest.FixtureRequest) -> str:
    """The device of the test's tensors."""
    device: str = request.param
    return device


@pytest.fixture
def session() -> rw.Session:
    """The session of a rank."""
    raise NotImplementedError("made on each rank")


@pytest.fixture
def world(session: rw.Session) -> rw.Session:
    """The same object as `session`."""
    return session


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> object:
    """Leave a fixture that needs the session to the ranks."""
    per_rank: list[Any] = request.node.stash.setdefault(_PER_RANK, []) if fixturedef.scope == "function" else []
    if fixturedef.argname != "session" and not {other.argname for other in per_rank} & {*fixturedef.argnames}:
        return None
    if fixturedef.argname not in {other.argname for other in per_rank}:
        per_rank.append(fixturedef)
    fixturedef.cached_result = (_OnEachRank, fixturedef.cache_key(request), None)
    return _OnEachRank


class _OnEachRank:
    """In place of the value of a fixture that is made on each rank."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on all ranks, and raise the error of the rank that failed first."""
    if read_marker(pyfuncitem) is None:
        return None
    RankThreads(pyfuncitem).run()
    return True


class RankThreads:
    """The ranks of one test."""

    def __init__(self, item: pytest.Function) -> None:
        self._item = item
        self._is_over = threading.Barrier(DEVICES)
        self._errors: list[tuple[int, BaseException]] = []

    def run(self) -> None:
        """Run the test, and end this process if the ranks do not end."""
        runner = threading.Thread(target=run_ranks, args=(self._run_rank,), name="ranks")
        runner.start()
        try:
            runner.join(2 * HANG_SECONDS)
        finally:  # also at the time limit of pytest: ranks that go on would take part in the next test
            if runner.is_alive():
                faulthandler.dump_traceback(file=2)
                os._exit(1)
        if self._errors:
            errors = sorted(self._errors, key=lambda failed: is_consequence(failed[1]))
            rank, error = errors[0]
            others = "; ".join(f"rank {other}: {type(one).__name__}: {one!s:.300}" for other, one in errors[1:])
            error.add_note(f"on rank {rank} of {DEVICES}{'; ' if others else ''}{others}")
            raise error

    def _run_rank(self) -> None:
        rank = rank_and_world_size()[0]
        try:
            self._run_body()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._errors.append((rank, error))
            self._is_over.abort()

    def _run_body(self) -> None:
        params = getattr(getattr(self._item, "callspec", None), "params", {})
        torch.set_default_device(params.get(_DEFAULT_DEVICE, "cpu"))
        with ExitStack() as stack:
            values: dict[str, Any] = {}
            for fixture in self._item.stash.get(_PER_RANK, []):
                values[fixture.argname] = stack.enter_context(self._value(fixture, values))
            argnames = self._item._fixtureinfo.argnames
            self._item.obj(**{name: values.get(name, self._item.funcargs[name]) for name in argnames})
            # No rank leaves the session while another one needs it; one that has failed does so at once.
            with suppress(threading.BrokenBarrierError):
                self._is_over.wait(HANG_SECONDS)

    @contextmanager
    def _value(self, fixture: Any, values: dict[str, Any]) -> Iterator[Any]:
        if fixture.argname == "session":
            with joined() as value:
                yield value
            return
        arguments = {name: values.get(name, self._item.funcargs.get(name)) for name in fixture.argnames}
        make: Callable[..., Any] = contextmanager(fixture.func) if isgeneratorfunction(fixture.func) else fixture.func
        made = make(**arguments)
        if isgeneratorfunction(fixture.func):
            with made as value:
                yield value
        else:
            yield made


@contextmanager
def joined() -> Iterator[rw.Session]:
    """Join the world of all devices, and leave it. Collective over the world."""
    session = rw.init(timeout=HANG_SECONDS)
    try:
        assert session.world_size == DEVICES
        yield session
    except BaseException as error:
        close_current(reason=f"left with {type(error).__name__}: {error}", failed=True)
        raise
    finally:
        close_current(reason="left the test")
