"""Recorded and described environments, of which parts are missing, garbled or mixed with those of another launcher."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rankwise._environment.detect import detect
from rankwise._environment.variables import VARIABLES
from rankwise.errors import LauncherEnvironmentError
from tests.environment.test_readers import CASES

DATA = Path(__file__).parents[1] / "data"
GARBAGE = ("", "x", "-1", "1.5", "99", "9" * 40, "2(x", "[", "\ud800", "[[[", "0x3", " 1")
TRIALS = 500


def environments() -> list[dict[str, str]]:
    """Return the variables of every recorded process, and of every reader's test, as far as a reader reads them."""
    recorded = [environ for path in sorted(DATA.glob("*/*.json")) for environ in json.loads(path.read_text()).values()]
    return [
        {name: value for name, value in environ.items() if name in VARIABLES}
        for environ in (*recorded, *(case.environ for case in CASES))
    ]


ENVIRONMENTS = environments()


def corrupted(dice: random.Random) -> tuple[dict[str, str], bool]:
    """Return an environment, and whether its values are all those of one launcher, of which some may be missing."""
    environ = dict(dice.choice(ENVIRONMENTS))
    kind = dice.choice(("missing", "garbled", "mixed"))
    names = sorted(environ)
    if kind == "missing":
        for name in dice.sample(names, dice.randrange(len(names) + 1)):
            del environ[name]
    elif kind == "garbled" and names:
        for name in dice.sample(names, dice.randint(1, min(3, len(names)))):
            environ[name] = dice.choice(GARBAGE)
    else:
        environ |= dice.choice(ENVIRONMENTS)
    return environ, kind == "missing"


@pytest.mark.soak(20)
def test_an_environment_gives_a_rank_of_its_variables_or_an_error_that_names_one(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - reproducible
    for _ in range(TRIALS):
        environ, is_subset = corrupted(dice)
        problem = ""
        try:
            reading = detect(environ)
        except LauncherEnvironmentError as error:
            problem = str(error)
        if problem:
            assert any(name in problem for name in VARIABLES), (problem, environ)
            continue
        assert 0 <= reading.rank.value < reading.world_size.value
        if is_subset and reading.rank.source in environ:
            assert str(reading.rank.value) == environ[reading.rank.source]
