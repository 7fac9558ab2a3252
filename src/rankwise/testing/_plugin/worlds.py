"""The worlds of a run of pytest: the configuration of their ranks, and the requests that run a test in them."""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
import random
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from torch.distributed import Store

from rankwise._launch.function_call import FunctionCall
from rankwise._launch.interpreter import search_path
from rankwise._pickling import dumps
from rankwise._rendezvous.store import serve
from rankwise.errors import LaunchError
from rankwise.testing._plugin import coverage, timeouts
from rankwise.testing._plugin.collection import name_in_file
from rankwise.testing._plugin.marker import RanksMarker
from rankwise.testing._plugin.messages import ItemId, RunConfig, RunTest
from rankwise.testing._plugin.rank_session import is_picklable, run_rank
from rankwise.testing._plugin.results import WorldResult
from rankwise.testing._plugin.runner import PhaseRunner
from rankwise.testing._plugin.snapshots import DISABLE_UNUSED
from rankwise.testing._plugin.tracebacks import interrupt_in
from rankwise.testing._plugin.worker_pool import WorkerPool
from rankwise.testing.environments import fake_torchrun

# Options with other values in ranks, which write no reports, select no tests and start no workers.
_OPTIONS_OF_RANKS: Final[Mapping[str, Any]] = {
    "capture": "no",
    "usepdb": False,
    "xmlpath": None,
    "lf": False,
    "failedfirst": False,
    "stepwise": False,
    "stepwise_skip": False,
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "dist": "no",
    "tx": [],
    "numprocesses": None,
    "cov_source": [],
    "pastebin": None,
    "durations": None,
    "pyargs": False,
    "setupshow": False,
    "setuponly": False,
    "setupplan": False,
    "log_file": os.devnull,
    "store_durations": False,
    DISABLE_UNUSED: True,
    "inline_snapshot": "disable",  # otherwise every rank rewrites the test's file, at the same time
}
# Plugins that limit the time of a test, repeat it or fork it, without the other ranks.
_NOT_IN_RANKS: Final = ("pytest_timeout", "pytest_rerunfailures", "pytest_retry", "flaky", "pytest_forked")
# The hook of pytest-xdist in which plugins give values to its workers.
_CONFIGURE_NODE: Final = "pytest_configure_node"
# Options that the parser sets by itself.
_SET_BY_PARSER: Final = frozenset({"file_or_dir", "_raise_print_help"})


class Worlds:
    """The worlds of a run of pytest.

    Attributes:
        leaks: The state that tests have left behind, each with the name of its test.
        interrupted: The stacks of ranks at Ctrl-C.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.leaks: list[tuple[str, str]] = []
        self.interrupted: dict[int, str] = {}
        self._runner: PhaseRunner | None = None
        self._config = config
        self._tests = 0
        self._stores: list[Store] = []
        self._hypothesis_seed = random.randrange(1 << 32)  # noqa: S311 - for examples, not for secrets
        self._is_captured = config.getoption("capture") != "no"
        self._pool: WorkerPool | None = self._new_pool()

    def begin(
        self, item: pytest.Item, marker: RanksMarker, size: int, next_item: pytest.Item | None
    ) -> Callable[[], WorldResult]:
        """Start a test in ranks, and return the function that runs it to its end.

        Ranks that do not exist yet are started.

        Args:
            item: The test.
            marker: Its marker.
            size: Its world size.
            next_item: The next test, if it runs in the same world and fixtures of wider scope are kept for it.
        """
        if self._pool is None:
            self._pool = self._new_pool()
        with self._closed_on_error(item):
            self._stores.append(self._send_test(self._pool, item, size, next_item))
            self._runner = runner = PhaseRunner(self._pool, size, marker.timeout, self._enter_debugger)
            runner.wait_until_started()
        return lambda: self._finish(item, runner)

    def limit(self, seconds: float, reason: str) -> None:
        """Stop the current test in this many seconds, if it is not over by then."""
        if self._runner is not None:
            self._runner.limit(seconds, reason)

    def close(self, *, gently: bool = True) -> list[str]:
        """End all ranks and the fork server, and return the errors of ranks at their end.

        Args:
            gently: Let ranks end by themselves.
        """
        pool, self._pool = self._pool, None
        problems = [] if pool is None else pool.close(gently=gently)
        coverage.combine(self._base())
        return problems

    @contextlib.contextmanager
    def _closed_on_error(self, item: pytest.Item) -> Iterator[None]:
        """End all ranks if the block raises; at Ctrl-C, request their stacks before."""
        try:
            yield
        except KeyboardInterrupt:
            if self._pool is not None:
                self.interrupted = self._pool.collect_stacks(self._pool.ranks)
            self.close(gently=False)
            interrupt_in(str(item.path), self.interrupted)
            raise
        except BaseException:
            self.close(gently=False)
            raise

    def _finish(self, item: pytest.Item, runner: PhaseRunner) -> WorldResult:
        """Run a test that ranks have started to its end."""
        with self._closed_on_error(item):
            world_result = runner.run()
            self.leaks += [(item.nodeid, text) for text in world_result.leaks]
            self._report_warnings(item, world_result)
            if not any(result.keeps_group for result in world_result.by_rank.values()):
                self._stores.clear()
            if world_result.is_clean and not self._config.getoption("ranks_fresh"):
                return world_result
            return replace(world_result, shutdown_errors=self._end_ranks())

    def _end_ranks(self) -> tuple[str, ...]:
        """End the ranks, and return their errors at the end."""
        try:
            return () if self._pool is None else tuple(self._pool.retire())
        except LaunchError:  # the fork server has died, which is in the result of the test already
            self.close(gently=False)
            return ()

    def _enter_debugger(self) -> None:
        """Call the hook by which plugins of this process, such as pytest-timeout, notice a debugger."""
        self._config.hook.pytest_enter_pdb(config=self._config, pdb=None)

    def _report_warnings(self, item: pytest.Item, world_result: WorldResult) -> None:
        """Add the warnings of ranks to those of the run, each once."""
        recorded = (warning for result in world_result.by_rank.values() for warning in result.warnings)
        for warning in dict.fromkeys(recorded):
            if warning.when == "runtest":
                # A class that is not a built-in one may not exist in this process.
                category = getattr(builtins, warning.category, UserWarning)
                text = warning.text if category.__name__ == warning.category else f"{warning.category}: {warning.text}"
                message = warnings.WarningMessage(category(text), category, warning.filename, warning.lineno)
                self._config.hook.pytest_warning_recorded.call_historic(
                    kwargs={"warning_message": message, "when": "runtest", "nodeid": item.nodeid, "location": None}
                )

    def _new_pool(self) -> WorkerPool:
        return WorkerPool(captured=self._is_captured)

    def _send_test(self, pool: WorkerPool, item: pytest.Item, size: int, next_item: pytest.Item | None) -> Store:
        """Start the ranks that do not exist yet, send a test to all, and return the store of its rendezvous."""
        store, port = serve(one_host=True, timeout=timeouts.START_SECONDS)
        environs = fake_torchrun(size, address="127.0.0.1", port=port, run_id=uuid.uuid4().hex)
        self._tests += 1
        tmp_path = str(self._base() / "ranks" / str(self._tests))
        pool.start(
            range(size),
            lambda number: (
                self._call(item, number),
                {name: environs[number][name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")},
            ),
            timeouts.START_SECONDS,
        )
        item_id, next_item_id = _item_id(item), None if next_item is None else _item_id(next_item)
        errors = self._base() / "errors"
        errors.mkdir(exist_ok=True)
        for number in range(size):
            rank = pool.ranks[number]
            rank.messages.clear()
            rank.new_output()  # drop the output after the last test
            environ = environs[number] | {"TORCHELASTIC_ERROR_FILE": str(errors / f"{self._tests}-{number}.json")}
            rank.send(RunTest(item_id=item_id, next_item_id=next_item_id, environ=environ, tmp_path=tmp_path))
        return store

    def _call(self, item: pytest.Item, number: int) -> bytes:
        """Return the call that makes a process a rank of this run, pickled."""
        given = vars(self._config.option)
        options = {name: given[name] for name in given.keys() - _SET_BY_PARSER if is_picklable(given[name])}
        options |= {name: value for name, value in _OPTIONS_OF_RANKS.items() if name in options}
        if options.get("hypothesis_seed", self) is None:
            # Ranks that draw different examples would call different collectives.
            options["hypothesis_seed"] = self._hypothesis_seed
        options["plugins"] = [*options["plugins"], "no:terminal", *map("no:{}".format, self._disabled_in_ranks())]
        options["basetemp"] = str(self._base() / f"rank{number}")
        options["rootdir"] = str(self._config.rootpath)
        options["inifilename"] = None if self._config.inipath is None else str(self._config.inipath)
        # All arguments of the run, since conftest files declare options; --pyargs has packages instead of paths.
        args = [str(item.path)] if self._config.getoption("pyargs") else list(self._config.args)
        run = RunConfig(
            options=options,
            args=[*map("-pno:{}".format, self._disabled_plugins()), *args],
            workerinput=self._workerinput,
            markers=self._config.getini("markers"),
            coverage=coverage.settings(self._base()),
            finish_lock=str(self._base() / "finish_lock"),
            output_lock="" if self._is_captured else str(self._base() / "output_lock"),
        )
        return pickle.dumps(FunctionCall(pickled=dumps((run_rank, (run,), {})), search_path=search_path()))

    def _disabled_in_ranks(self) -> list[str]:
        """Return the names of plugins that ranks load, for the options that they declare, and then disable."""
        return [
            name
            for name, plugin in self._config.pluginmanager.list_name_plugin()
            if getattr(plugin, "__name__", "").partition(".")[0] in _NOT_IN_RANKS
        ]

    def _disabled_plugins(self) -> list[str]:
        """Return the names of plugins that are disabled in this run."""
        return [name for name, plugin in self._config.pluginmanager.list_name_plugin() if plugin is None]

    @cached_property
    def _workerinput(self) -> dict[str, Any]:
        """The values that plugins give to workers of pytest-xdist: they take a rank for one."""
        given = getattr(self._config, "workerinput", None)  # of this process, if it is a worker itself
        if given is None:
            given = {"workerid": "master", "testrunuid": uuid.uuid4().hex}
            manager = self._config.pluginmanager
            if hasattr(manager.hook, _CONFIGURE_NODE):
                node = SimpleNamespace(config=self._config, workerinput=given, gateway=SimpleNamespace(id="master"))
                # But for pytest-cov, whose hook works only in a run of several workers.
                manager.subset_hook_caller(_CONFIGURE_NODE, [manager.get_plugin("_cov")])(node=node)
        return {name: value for name, value in given.items() if is_picklable(value)}

    def _base(self) -> Path:
        base: Path = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # noqa: SLF001
        return base


def _item_id(item: pytest.Item) -> ItemId:
    return ItemId(path=str(item.path), name=name_in_file(item))
