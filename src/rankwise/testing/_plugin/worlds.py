"""The worlds of a run of pytest: what a rank needs to become one, and what a test needs to run there."""

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
from rankwise.testing._plugin import coverage
from rankwise.testing._plugin.collection import name_in_file
from rankwise.testing._plugin.marker import RanksMarker
from rankwise.testing._plugin.messages import ItemId, RunConfig, RunTest
from rankwise.testing._plugin.rank_session import is_picklable, run_rank
from rankwise.testing._plugin.runner import START_SECONDS, PhaseRunner, WorldResult
from rankwise.testing._plugin.snapshots import DISABLE_UNUSED
from rankwise.testing._plugin.tracebacks import interrupt_in
from rankwise.testing._plugin.worker_pool import WorkerPool
from rankwise.testing.environments import fake_torchrun

# Ranks write no reports, choose no tests and start no workers.
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
    "inline_snapshot": "disable",  # or every rank writes the file of the test anew, and they spoil it
}
# Plugins that time a test, repeat it or fork it, in one rank alone.
_NOT_IN_RANKS: Final = ("pytest_timeout", "pytest_rerunfailures", "pytest_retry", "flaky", "pytest_forked")
# Of pytest-xdist, where plugins tell its workers what they need to know.
_CONFIGURE_NODE: Final = "pytest_configure_node"
# What the parser finds by itself.
_OF_THE_COMMAND_LINE: Final = frozenset({"file_or_dir", "_raise_print_help"})


class Worlds:
    """The worlds of a run of pytest.

    Attributes:
        left: What tests have left behind: their names, and what it was.
        interrupted: The stacks of ranks when Ctrl-C came.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.left: list[tuple[str, str]] = []
        self.interrupted: dict[int, str] = {}
        self._conductor: PhaseRunner | None = None
        self._config = config
        self._number = 0
        self._stores: list[Store] = []
        self._seed = random.randrange(1 << 32)  # noqa: S311 - for examples, not for secrets
        self._is_captured = config.getoption("capture") != "no"
        self._ranks: WorkerPool | None = self._new_ranks()

    def begin(
        self, item: pytest.Item, ranks: RanksMarker, size: int, following: pytest.Item | None
    ) -> Callable[[], WorldResult]:
        """Let ranks begin a test, which are started where they are not there yet, and return what runs it to its end.

        Args:
            item: The test.
            ranks: What its marker asks for.
            size: How many ranks.
            following: The next test, if it runs in the same world, so that fixtures of wider scope stay for it.
        """
        if self._ranks is None:
            self._ranks = self._new_ranks()
        with self._closed_if_broken(item):
            self._stores.append(self._tell(self._ranks, item, size, following))
            self._conductor = conductor = PhaseRunner(self._ranks, size, ranks.timeout, self._note_debugger)
            conductor.gather()
        return lambda: self._finish(item, conductor)

    def limit(self, seconds: float, reason: str) -> None:
        """Stop the test that runs so many seconds from now, if it is not over by then."""
        if self._conductor is not None:
            self._conductor.limit(seconds, reason)

    def close(self, *, gently: bool = True) -> list[str]:
        """End all ranks, and what they are forked from, and return what went wrong on them then.

        Args:
            gently: Let ranks end by themselves.
        """
        ranks, self._ranks = self._ranks, None
        problems = [] if ranks is None else ranks.close(gently=gently)
        coverage.combine(self._base())
        return problems

    @contextlib.contextmanager
    def _closed_if_broken(self, item: pytest.Item) -> Iterator[None]:
        """Let nothing run on that nobody leads any more; after Ctrl-C, find out where it was."""
        try:
            yield
        except KeyboardInterrupt:
            if self._ranks is not None:
                self.interrupted = self._ranks.collect_stacks(self._ranks.ranks)
            self.close(gently=False)
            interrupt_in(str(item.path), self.interrupted)
            raise
        except BaseException:
            self.close(gently=False)
            raise

    def _finish(self, item: pytest.Item, conductor: PhaseRunner) -> WorldResult:
        """Lead ranks that have begun a test to its end."""
        with self._closed_if_broken(item):
            outcome = conductor.conduct()
            self.left += [(item.nodeid, text) for text in outcome.left]
            self._tell_warnings(item, outcome)
            if not any(attempt.joined for attempt in outcome.attempts.values()):
                self._stores.clear()
            if outcome.is_clean and not self._config.getoption("ranks_fresh"):
                return outcome
            return replace(outcome, afterwards=self._retired())

    def _retired(self) -> tuple[str, ...]:
        """End the ranks, and return what went wrong then."""
        try:
            return () if self._ranks is None else tuple(self._ranks.retire())
        except LaunchError:  # the outcome tells of it
            self.close(gently=False)
            return ()

    def _note_debugger(self) -> None:
        """Tell plugins of this process, such as pytest-timeout, that somebody debugs."""
        self._config.hook.pytest_enter_pdb(config=self._config, pdb=None)

    def _tell_warnings(self, item: pytest.Item, outcome: WorldResult) -> None:
        """Tell pytest of the warnings of ranks, each once."""
        for warned in dict.fromkeys(warned for attempt in outcome.attempts.values() for warned in attempt.warned):
            if warned.when == "runtest":
                category = getattr(builtins, warned.category, UserWarning)
                text = warned.text if category.__name__ == warned.category else f"{warned.category}: {warned.text}"
                message = warnings.WarningMessage(category(text), category, warned.filename, warned.lineno)
                self._config.hook.pytest_warning_recorded.call_historic(
                    kwargs={"warning_message": message, "when": "runtest", "nodeid": item.nodeid, "location": None}
                )

    def _new_ranks(self) -> WorkerPool:
        return WorkerPool(captured=self._is_captured)

    def _tell(self, warm: WorkerPool, item: pytest.Item, size: int, following: pytest.Item | None) -> Store:
        """Tell the ranks of a test, once they are there, and return the store that they meet at."""
        store, port = serve(one_host=True, timeout=START_SECONDS)
        environs = fake_torchrun(size, address="127.0.0.1", port=port, run_id=uuid.uuid4().hex)
        self._number += 1
        folder = str(self._base() / "ranks" / str(self._number))
        warm.start(
            range(size),
            lambda number: (
                self._call(item, number),
                {name: environs[number][name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")},
            ),
            START_SECONDS,
        )
        place, following_place = _place(item), None if following is None else _place(following)
        errors = self._base() / "errors"
        errors.mkdir(exist_ok=True)
        for number in range(size):
            rank = warm.ranks[number]
            rank.messages.clear()
            rank.new_output()
            environ = environs[number] | {"TORCHELASTIC_ERROR_FILE": str(errors / f"{self._number}-{number}.json")}
            rank.send(RunTest(place=place, following=following_place, environ=environ, folder=folder))
        return store

    def _call(self, item: pytest.Item, number: int) -> bytes:
        """Return what makes a process a rank of this run."""
        given = vars(self._config.option)
        options = {name: given[name] for name in given.keys() - _OF_THE_COMMAND_LINE if is_picklable(given[name])}
        options |= {name: value for name, value in _OPTIONS_OF_RANKS.items() if name in options}
        if options.get("hypothesis_seed", self) is None:
            options["hypothesis_seed"] = self._seed  # ranks that draw different examples part ways
        options["plugins"] = [*options["plugins"], "no:terminal", *map("no:{}".format, self._not_in_ranks())]
        options["basetemp"] = str(self._base() / f"rank{number}")
        options["rootdir"] = str(self._config.rootpath)
        options["inifilename"] = None if self._config.inipath is None else str(self._config.inipath)
        # All of the run's, for what conftest files declare; packages by name are found by the file of the test.
        args = [str(item.path)] if self._config.getoption("pyargs") else list(self._config.args)
        run = RunConfig(
            options=options,
            args=[*map("-pno:{}".format, self._switched_off()), *args],
            workerinput=self._workerinput,
            markers=self._config.getini("markers"),
            measured=coverage.settings(self._base()),
            ends=str(self._base() / "ends"),
            turns="" if self._is_captured else str(self._base() / "turns"),
        )
        return pickle.dumps(FunctionCall(pickled=dumps((run_rank, (run,), {})), search_path=search_path()))

    def _not_in_ranks(self) -> list[str]:
        """Return the names of plugins that ranks load, for the settings that they declare, and then switch off."""
        return [
            name
            for name, plugin in self._config.pluginmanager.list_name_plugin()
            if getattr(plugin, "__name__", "").partition(".")[0] in _NOT_IN_RANKS
        ]

    def _switched_off(self) -> list[str]:
        """Return the names of plugins that are not loaded in this run."""
        return [name for name, plugin in self._config.pluginmanager.list_name_plugin() if plugin is None]

    @cached_property
    def _workerinput(self) -> dict[str, Any]:
        """What plugins give to workers of pytest-xdist, for one of which they take a rank."""
        given = getattr(self._config, "workerinput", None)  # of this process, if it is one
        if given is None:
            given = {"workerid": "master", "testrunuid": uuid.uuid4().hex}
            manager = self._config.pluginmanager
            if hasattr(manager.hook, _CONFIGURE_NODE):
                node = SimpleNamespace(config=self._config, workerinput=given, gateway=SimpleNamespace(id="master"))
                # What pytest-cov does there works in a run of several workers alone.
                manager.subset_hook_caller(_CONFIGURE_NODE, [manager.get_plugin("_cov")])(node=node)
        return {name: value for name, value in given.items() if is_picklable(value)}

    def _base(self) -> Path:
        base: Path = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # noqa: SLF001
        return base


def _place(item: pytest.Item) -> ItemId:
    return ItemId(path=str(item.path), name=name_in_file(item))
