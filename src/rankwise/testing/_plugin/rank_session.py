"""Being a rank that runs tests: a session of pytest that runs what it is told, one test after the other.

So fixtures, marks, plugins and asserts are pytest's own here. To other plugins a rank looks like a worker of
pytest-xdist: it writes no report and no cache.
"""

from __future__ import annotations

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
from rankwise.testing._plugin.teardown import GroupTeardown

# The name under which what makes a process a rank is registered with pytest.
PLUGIN: Final = "rankwise-rank"
# Makes a rank write its stacks where it would write a crash. Nobody else uses the last of the real-time signals.
STACKS: Final = getattr(signal, "SIGRTMAX", signal.SIGUSR1)
# Why a test failed here, for the fixture that closes the session.
FAILURE: Final = pytest.StashKey[str]()
# The closed process group of a test, which is let go of once all has been told.
CLOSED_GROUP: Final = pytest.StashKey[list[object]]()

# Where torch logs every error of a collective in a long line, by default to nowhere; pytest would show it.
_LOGS_FOR_NOBODY: Final = "c10d-NullHandler-default"
# The plugin of hypothesis, which does not import hypothesis itself.
_HYPOTHESIS: Final = "_hypothesis_pytestplugin"
_NOT_REPORTED: Final = (
    "a plugin runs tests in its own way, without reporting each phase when it is over; so ranks cannot wait for each "
    "other (-p no:NAME switches a plugin off)"
)


def load_plugins() -> None:
    """Import pytest's plugins, as a session does, before ranks are forked, each of which has a session."""
    _leave_asserts_alone()
    config = pytest.Config.fromdictargs({"plugins": ["no:terminal"], "noconftest": True, "cov_source": []}, [])
    if _HYPOTHESIS in sys.modules:
        # Every rank has a seed, for which the plugin imports hypothesis. In a rank it would warn of random generators
        # that were made before the fork, since `gc` no longer finds what refers to them. Errors are left to the ranks.
        with contextlib.suppress(Exception):
            importlib.import_module("hypothesis")  # while pytest rewrites asserts, or it warns that it could not
    config._ensure_unconfigure()  # noqa: SLF001 - a configuration that was not used has no other end


def run_rank(connection: socket.socket, crashes: int, run: RunConfig) -> None:
    """Run tests until there are no more.

    Args:
        connection: To pytest's own process.
        crashes: Where to write stacks when asked to.
        run: What to know of the run of pytest.
    """
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    logging.getLogger(_LOGS_FOR_NOBODY).disabled = True
    _leave_asserts_alone()
    output = shared_output.share_standard_streams(run.turns) if run.turns else []
    random_state = RandomState()
    with coverage.measured(run.measured):
        config = pytest.Config.fromdictargs(dict(run.options), run.args)
        # Without pytest-xdist plugins give nothing, and what they look for there is an option of theirs.
        config.workerinput = {**run.options, **run.workerinput}  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
        # What colours the explanation of an assert in pytest 8, which asks for it where there is no terminal too.
        config.get_terminal_writer = lambda: create_terminal_writer(config)  # type: ignore[method-assign]
        for marker in run.markers:
            config.addinivalue_line("markers", marker)
        config.pluginmanager.register(_RankHooks(connection, crashes, config, random_state, output), PLUGIN)
        if run.options.get("cov_context") == "test":
            config.pluginmanager.register(coverage.CoverageContexts())
        SessionFinishLock(run.ends).register(config.pluginmanager)
        config.hook.pytest_cmdline_main(config=config)


def _leave_asserts_alone() -> None:
    """Tell pytest that there are none here. It rewrites those of plugins, and warns where these are loaded already."""
    rankwise.__doc__ = f"{rankwise.__doc__}\nPYTEST_DONT_REWRITE"


def is_picklable(value: object) -> bool:
    """Return whether a value can be carried to another process; what cannot is some plugin's, of one process."""
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever pickle says of it
        return False
    return True


def _phase(when: str, report: dict[str, Any], error: BaseException | None) -> PhaseReport:
    """Return what to tell of a phase."""
    if error is None:
        return PhaseReport(when=when, report=report, time_ns=time.monotonic_ns())
    return PhaseReport(
        when=when,
        report=report,
        consequence=is_consequence(error),
        time_ns=time.monotonic_ns(),
        raised=summary_with_location(error),
        error=pickle_error(error) if "pytest_rerunfailures" in sys.modules else b"",
    )


class _RankHooks:
    """The hooks by which a session of pytest becomes a rank."""

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
        self._process = os.getpid()
        self._crashes = crashes
        self._config = config
        self._folder = ""
        self._basetemp = config.option.basetemp
        self._folders = 1
        self._state = LeakDetector(config.rootpath, random_state)
        self._tests = LazyCollection(config, self._state.settle)
        config.pluginmanager.register(self._tests)
        config.pluginmanager.register(DebuggerHooks(self._tell, is_captured=not output))
        self._error: BaseException | None = None
        self._letting_go = GroupTeardown()
        self._reported = ""
        self._may_go_on = False
        self._over = False

    @pytest.fixture
    def tmp_path(self) -> Path:
        """A folder of this test, the same on all ranks."""
        folder = Path(self._folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        faulthandler.register(STACKS, file=self._crashes, all_threads=True)
        try:
            while not self._over and (task := receive_message(self._connection)) is not None:
                self._run(session, task)
        except EOFError:
            pass  # pytest is gone
        self._letting_go.wait()
        return True

    def pytest_internalerror(self, excrepr: object) -> None:
        self._tell(Aborted(text=f"pytest failed on this rank:\n{excrepr}"))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        error = excinfo.value
        if isinstance(error, pytest.exit.Exception):
            self._tell(Aborted(text=f"called pytest.exit: {error.msg}", stop=(str(error.msg), error.returncode)))
        else:
            self._tell(Aborted(text=f"raised {type(error).__name__}"))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        self._tell(
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
        with self._state.keeping():  # until the fixture ends, with a later test
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        if self._reported != "setup":
            pytest.fail(_NOT_REPORTED, pytrace=False)
        if not self._may_go_on:
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
        # Here it is as plugins have left it, but for those that look when it is shown, and those of subtests come too.
        self._config.hook.pytest_report_teststatus(report=report, config=self._config)
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        data = {name: value if is_picklable(value) else repr(value) for name, value in data.items()}
        if type(report) is not pytest.TestReport:
            self._tell(SubtestReport(report=data))
            return
        self._tell(_phase(report.when, data, self._error if report.failed else None))
        self._reported = report.when
        if report.when != PHASES[-1]:
            self._wait_for_others()

    def _run(self, session: pytest.Session, task: RunTest) -> None:
        os.environ.update(task.environ)
        os.environ.update(run_variables(os.environ))
        shared_output.set_label(self._output, int(task.environ["RANK"]), int(task.environ["WORLD_SIZE"]))
        self._folder = task.folder
        item = self._tests.find(session, task.place)
        following = None if task.following is None else self._tests.find(session, task.following)
        if item is None:
            self._tell(Aborted(text=self._tests.problem(task.place)))
            return
        faulthandler.enable(self._crashes)  # pytest takes it at first, and torch where a function has its `record`
        self._state.begin()
        self._reported = ""
        self._tell(Started())
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if not self._reported:
            self._tell(Aborted(text=_NOT_REPORTED))
            return
        self._error = None  # whose traceback holds what the test has held
        restore_sigint_handler()
        self._tell(Finished(left=self._state.left(), joined=torch.distributed.is_initialized()))
        if following is None:
            self._state.forget()
            self._make_folder_anew()
        if CLOSED_GROUP in item.stash:
            self._letting_go.begin(item.stash[CLOSED_GROUP])

    def _make_folder_anew(self) -> None:
        """Let fixtures of wider scope, which have all ended, find an empty folder when they are made again."""
        self._folders += 1
        self._config.option.basetemp = f"{self._basetemp}-{self._folders}"
        factory = pytest.TempPathFactory.from_config(self._config, _ispytest=True)
        self._config._tmp_path_factory = factory  # type: ignore[attr-defined]  # noqa: SLF001 - where pytest keeps it

    def _wait_for_others(self) -> None:
        """Wait for the other ranks, and take note whether all are ready for the next phase.

        Between two phases, and not where a phase begins: there another plugin's hook may raise first.
        """
        answer: bool | None = None if self._over else receive_message(self._connection)
        self._over = answer is None  # the test did not come to an end elsewhere, so this rank ends too
        self._may_go_on = bool(answer)

    def _tell(self, message: object) -> None:
        if os.getpid() != self._process:
            os.write(2, b"a process that the test has forked came to the end of the test\n")
            os._exit(1)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a test may have put anything there
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # what compiled code has printed
        self._connection.sendall(serialize(message))
