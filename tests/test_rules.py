"""Rules that no single room keeps: where the environment is read, and that cost does not grow with the world."""

from __future__ import annotations

import cProfile
import pstats
import re
from collections.abc import Callable
from pathlib import Path

import torch

import rankwise as rw
from rankwise.testing.fakes import fake_group

SOURCE = Path(rw.__file__).parent
ROOT = Path(__file__).parents[1]


def test_the_environment_is_read_in_one_place_and_written_for_children_only() -> None:
    """Rule 1. Launchers look at their own environment to hand it on, tests hide it; _torch looks where gloo will.

    The fork server observes which variables a module reads when it is imported (`preloading`).

    The one exception is a drop-in: mmcv's `init_dist` says there who a rank is, and other libraries read it.
    """
    touching = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if re.search(r"(?<!`)os\.(environ|getenv|putenv)", path.read_text())
    }
    assert touching == {
        "_torch.py",
        "compat/mmcv.py",
        "_launch/spec.py",
        "_launch/engines/ray_actor.py",
        "_launch/engines/slurm_task.py",
        "_launch/forkserver/preloading.py",
        "_launch/forkserver/worker.py",
        "_session/environ.py",
        "testing/_plugin/rank_session.py",
        "testing/_plugin/leaks.py",
    }
    writing = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if re.search(r"os\.environ(\[[^]]+\] =|\.(update|pop|clear|setdefault))|os\.putenv", path.read_text())
    }
    wanted = {"_torch.py", "compat/mmcv.py", "_launch/forkserver/worker.py", "testing/_plugin/rank_session.py"}
    wanted |= {"_launch/spec.py"}
    assert writing == wanted, "in C alone; where mmcv's users read it; in the child itself, twice; hidden from sbatch"


def test_the_lanes_of_ci_are_those_of_contributing() -> None:
    """Each lane of the Makefile is documented, and every test is in exactly one of those of CI and the rare ones."""
    makefile, contributing = ((ROOT / name).read_text() for name in ("Makefile", "CONTRIBUTING.md"))
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert f"CI runs `{command}`" in contributing
    lanes = dict(re.findall(r"^([\w-]+): .*\n\t\$\(PYTEST\) -m (\"[^\"]+\"|\w+)", makefile, re.MULTILINE))
    assert {lane: marker for lane, marker in lanes.items() if lane in [*command.split(), "test-rare"]} == {
        "test": '"not slow"',
        "test-slow": '"slow and not rare"',
        "test-rare": "rare",
    }
    for lane in lanes:
        assert f"| `make {lane}` |" in contributing


def calls_in_rankwise(talk: Callable[[], object]) -> int:
    """Count the calls of Python functions that one collective makes."""
    talk()
    profile = cProfile.Profile()
    profile.runcall(talk)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]  # typeshed leaves it out


def test_cost_does_not_grow_with_the_world() -> None:
    """Rule 10: the same number of calls at 100 ranks and at 16,384, for what need not know every rank."""
    tensor = torch.ones(10)
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    talks: dict[str, Callable[[], object]] = {
        "get_rank": rw.get_rank,
        "get_world_size": rw.get_world_size,
        "all_reduce": lambda: rw.all_reduce(tensor),
        "all_reduce of numbers": lambda: rw.all_reduce({"loss": 0.5, "seen": 8}),
        "mean": lambda: rw.all_reduce(tensor, op="mean"),
        "barrier": rw.barrier,
        "sync_grads": lambda: rw.sync_grads(parameters),
        "sync_params": lambda: rw.sync_params(torch.nn.Linear(2, 2)),
    }
    with torch.random.fork_rng():
        with fake_group(world_size=100):
            small = {name: calls_in_rankwise(talk) for name, talk in talks.items()}
        with fake_group(world_size=16_384):
            assert rw.get_world_size() == 16_384
            large = {name: calls_in_rankwise(talk) for name, talk in talks.items()}
    assert large == small


def test_one_module_waits_for_descriptors() -> None:
    waiting = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if re.search(
            r"^\s*(import|from) (select|selectors|multiprocessing\.connection)\b", path.read_text(), re.MULTILINE
        )
    }
    assert waiting == {"_net/polling.py"}
