"""The session of pytest in a rank: it runs the tests that pytest's own process requests, one after the other.

So fixtures, marks, plugins and asserts are pytest's own here. To other plugins a rank looks like a worker of
pytest-xdist: it writes no report and no cache. `messages` describes the protocol with pytest's own process.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import faulthandler
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from _pytest.config import create_terminal_writer

import rankwise
from rankwise._environment.nesting import run_variables
from rankwise._launch.forkserver.ipc import receive_message, serialize
from rankwise._launch.forkserver.worker import pickle_error
from rankwise._launch.rank_traceback import is_consequence
from rankwise._session.session import summary_with_location
from rankwise.testing._plugin import coverage, shared_output
from rankwise.testing._plugin.collection import LazyCollection
from rankwise.testing._plugin.debugging import DebuggerHooks, restore_sigint_handler
from rankwise.testing._plugin.fixtures import CLOSED_GROUP, FAILURE
from rankwise.testing._plugin.leaks import LeakDetector, RandomState
from rankwise.testing._plugin.messages import (
    PHASES,
    Aborted,
    Finished,
    PhaseReport,
    RecordedWarning,
    RunConfig,
    RunTest,
    Started,
    SubtestReport,
)
from rankwise.testing._plugin.snapshots import SessionFinishLock

# The name of the plugin that is registered with pytest in ranks alone.
PLUGIN: Final = "rankwise-rank"
# Makes a rank write its stacks to its crash file. No other program uses the last real-time signal.
STACKS: Final = getattr(signal, "SIGRTMAX", signal.SIGUSR1)
# Torch's logger of every error of a collective, in a long line. It has no output by default, but pytest would show it.
_SILENT_LOGGER: Final = "c10d-NullHandler-default"
# The plugin of hypothesis, which does not import hypothesis itself.
_HYPOTHESIS: Final = "_hypothesis_pytestplugin"
_NOT_REPORTED: Final = (
    "a plugin runs tests in its own way, without reporting each phase when it is over; so ranks cannot wait for each "
    "other (-p no:NAME switches a plugin off)"
)


class GroupTeardown:
    """Drops the last reference to a closed process group on a thread of its own.

    gloo closes its connections one after the other, and waits up to 10 ms for each, which is half of the time of a
    small test. The thread is not one of `threading`, so that a test that counts threads does not find it.
    """

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()  # held while the thread runs

    def begin(self, groups: list[object]) -> None:
        """Start to empty a list that has the last reference to a group; wait for the last group before."""
        self._lock.acquire()
        _thread.start_new_thread(self._empty, (groups,))

    def wait(self) -> None:
        """Wait for the thread: the interpreter must not end before it."""
        with self._lock:
            pass

    def _empty(self, groups: list[object]) -> None:
        groups.clear()
        self._lock.release()


def load_plugins() -> None:
    """Import pytest's plugins, as a session does, before the ranks with their sessions are forked."""
    _disable_assert_rewriting()
    config = pytest.Config.fromdictargs({"plugins": ["no:terminal"], "noconftest": True, "cov_source": []}, [])
    if _HYPOTHESIS in sys.modules:
        # Every rank has a seed, for which the plugin imports hypothesis. In a rank it would warn of random generators
        # that were made before the fork, since `gc` no longer finds references to them. Errors are left to the ranks.
        with contextlib.suppress(Exception):
            importlib.import_module("hypothesis")  # while pytest rewrites asserts, or it warns that it could not
    config._ensure_unconfigure()  # noqa: SLF001 - the only way to close a configuration that was not used


def run_rank(connection: socket.socket, crashes: int, run: RunConfig) -> None:
    """Run tests until pytest's own process has no more. The main function of a rank.

    Args:
        connection: The connection to pytest's own process.
        crashes: The descriptor of the file for stacks, of a crash or on request.
        run: The configuration of the run of pytest.
    """
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    logging.getLogger(_SILENT_LOGGER).disabled = True
    _disable_assert_rewriting()
    output = shared_output.share_standard_streams(run.output_lock) if run.output_lock else []
    random_state = RandomState()
    with coverage.measured(run.coverage):
        config = pytest.Config.fromdictargs(dict(run.options), run.args)
        # Without pytest-xdist plugins give no values, and read their own options from there.
        config.workerinput = {**run.options, **run.workerinput}  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
        # pytest 8 colours the explanation of an assert with it, also without the terminal plugin that defines it.
        config.get_terminal_writer = lambda: create_terminal_writer(config)  # type: ignore[method-assign]
        for marker in run.markers:
            config.addinivalue_line("markers", marker)
        config.pluginmanager.register(_RankHooks(connection, crashes, config, random_state, output), PLUGIN)
        if run.options.get("cov_context") == "test":
            config.pluginmanager.register(coverage.CoverageContexts())
        SessionFinishLock(run.finish_lock).register(config.pluginmanager)
        config.hook.pytest_cmdline_main(config=config)


def _disable_assert_rewriting() -> None:
    """Mark rankwise for pytest, which rewrites the asserts of plugins, and warns of those that are imported already."""
    rankwise.__doc__ = f"{rankwise.__doc__}\nPYTEST_DONT_REWRITE"


def is_picklable(value: object) -> bool:
    """Return whether a value can be sent to another process. Some plugins keep objects of one process in options."""
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - pickling runs the value's own code
        return False
    return True


def _phase_report(when: str, report: dict[str, Any], error: BaseException | None) -> PhaseReport:
    if error is None:
        return PhaseReport(when=when, report=report, time_ns=time.monotonic_ns())
    return PhaseReport(
        when=when,
        report=report,
        is_consequence=is_consequence(error),
        time_ns=time.monotonic_ns(),
        error_text=summary_with_location(error),
        error=pickle_error(error) if "pytest_rerunfailures" in sys.modules else b"",
    )


class _RankHooks:
    """The hooks that make a session of pytest a rank."""

    def __init__(
        self,
        connection: socket.socket,
        crashes: int,
        config: pytest.Config,
        random_state: RandomState,
        output: list[shared_output.LabelledStream],
    ) -> None:
        self._connection = connection
        self._output = output
        self._pid = os.getpid()
        self._crashes = crashes
        self._config = config
        self._tmp_path = ""
        self._basetemp = config.option.basetemp
        self._basetemps = 1
        self._leaks = LeakDetector(config.rootpath, random_state)
        self._collection = LazyCollection(config, self._leaks.accept_modules)
        config.pluginmanager.register(self._collection)
        config.pluginmanager.register(DebuggerHooks(self._send, is_captured=not output))
        self._error: BaseException | None = None
        self._group_teardown = GroupTeardown()
        self._last_reported = ""  # the phase of the current test that was reported last
        self._runs_body = False
        self._is_over = False

    @pytest.fixture
    def tmp_path(self) -> Path:
        """A folder of this test, the same on all ranks."""
        folder = Path(self._tmp_path)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        faulthandler.register(STACKS, file=self._crashes, all_threads=True)
        try:
            while not self._is_over and (request := receive_message(self._connection)) is not None:
                self._run(session, request)
        except EOFError:
            pass  # pytest's own process has ended
        self._group_teardown.wait()
        return True

    def pytest_internalerror(self, excrepr: object) -> None:
        self._send(Aborted(text=f"pytest failed on this rank:\n{excrepr}"))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        error = excinfo.value
        if isinstance(error, pytest.exit.Exception):
            self._send(Aborted(text=f"called pytest.exit: {error.msg}", pytest_exit=(str(error.msg), error.returncode)))
        else:
            self._send(Aborted(text=f"raised {type(error).__name__}"))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        self._send(
            RecordedWarning(
                text=str(warning_message.message),
                category=warning_message.category.__name__,
                filename=warning_message.filename,
                lineno=warning_message.lineno,
                when=when,
            )
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        with self._leaks.allowed():  # until the fixture ends, with a later test
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        if self._last_reported != "setup":
            pytest.fail(_NOT_REPORTED, pytrace=False)
        if not self._runs_body:
            pytest.skip("the fixtures of another rank failed")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._error = None if call.excinfo is None else call.excinfo.value
        if self._error is not None:
            item.stash[FAILURE] = summary_with_location(self._error)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # The last hook of a report: other plugins have changed it, except those that do so in the next line's hook.
        # Reports of subtests arrive here too.
        self._config.hook.pytest_report_teststatus(report=report, config=self._config)
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        data = {name: value if is_picklable(value) else repr(value) for name, value in data.items()}
        if type(report) is not pytest.TestReport:
            self._send(SubtestReport(report=data))
            return
        self._send(_phase_report(report.when, data, self._error if report.failed else None))
        self._last_reported = report.when
        if report.when != PHASES[-1]:
            self._wait_at_barrier()

    def _run(self, session: pytest.Session, request: RunTest) -> None:
        os.environ.update(request.environ)
        os.environ.update(run_variables(os.environ))
        shared_output.set_label(self._output, int(request.environ["RANK"]), int(request.environ["WORLD_SIZE"]))
        self._tmp_path = request.tmp_path
        item = self._collection.find(session, request.item_id)
        next_item = None if request.next_item_id is None else self._collection.find(session, request.next_item_id)
        if item is None:
            self._send(Aborted(text=self._collection.problem(request.item_id)))
            return
        # Every time: pytest directs it to stderr first, and torch to a file where a function has torch's `record`.
        faulthandler.enable(self._crashes)
        self._leaks.begin()
        self._last_reported = ""
        self._send(Started())
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        if not self._last_reported:
            self._send(Aborted(text=_NOT_REPORTED))
            return
        self._error = None  # whose traceback refers to the local variables of the test
        restore_sigint_handler()
        self._send(Finished(leaks=self._leaks.leaks(), keeps_group=torch.distributed.is_initialized()))
        if next_item is None:
            self._leaks.forget_allowed()
            self._renew_basetemp()
        if CLOSED_GROUP in item.stash:
            self._group_teardown.begin(item.stash[CLOSED_GROUP])

    def _renew_basetemp(self) -> None:
        """Give fixtures of wider scope an empty folder when they are made again; all of them have ended."""
        self._basetemps += 1
        self._config.option.basetemp = f"{self._basetemp}-{self._basetemps}"
        factory = pytest.TempPathFactory.from_config(self._config, _ispytest=True)
        self._config._tmp_path_factory = factory  # type: ignore[attr-defined]  # noqa: SLF001 - where pytest keeps it

    def _wait_at_barrier(self) -> None:
        """Wait for the other ranks, after a phase, and store whether the body is to run.

        Between two phases, and not at the start of the next one: there another plugin's hook may raise before this one.
        """
        reply: bool | None = None if self._is_over else receive_message(self._connection)
        self._is_over = reply is None  # the test was given up, so this rank ends too
        self._runs_body = bool(reply)

    def _send(self, message: object) -> None:
        if os.getpid() != self._pid:  # a fork has the connection too
            os.write(2, b"a process that the test has forked came to the end of the test\n")
            os._exit(1)
        # First the output: pytest's own process takes it as that of the phase whose report it receives.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a test may have replaced it by any object
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # the buffers of compiled code
        self._connection.sendall(serialize(message))
