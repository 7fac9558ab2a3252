"""Random programs of collectives in overlapping groups, in which ranks fail, differ, are stopped, or end.

Each rank compares each result with the expected one, and each error with its cause: see programs/random_program.py.
"""

from __future__ import annotations

import json

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.lanes import variants
from tests.session.random_programs import Program, programs
from tests.session.worlds import free_port, plain, run_ranks

ROUTES = ["page", "sockets", "several hosts"]
# Failures depend on time too, so smaller examples would mislead.
EXAMPLES = settings(
    max_examples=4,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
EXIT_CODES = {"kill": -9, "kill soon": -9, "exit": 7, "raise": 1, "leave": 0}


def run(program: Program, route: str) -> None:
    port = free_port()
    environs = [plain(rank, program["size"], port) for rank in range(program["size"])]
    ended = run_ranks("random_program.py", environs, json.dumps(program), route)
    _, faulty, way = program["end"] or (0, None, "")
    wanted = [EXIT_CODES[way] if rank == faulty else 0 for rank in range(program["size"])]
    found = [process.returncode for process in ended]
    assert found == wanted, "\n".join(process.stderr[-2000:] for process in ended)


@pytest.mark.soak(30)
@pytest.mark.parametrize("ends", variants([False, True], slow=[True]), ids=["errors", "ends"])
@pytest.mark.parametrize("route", variants(ROUTES, slow=["page", "several hosts"]))
def test_random_programs(route: str, ends: bool, seed: int) -> None:
    @hypothesis.seed(seed)
    @EXAMPLES
    @given(programs(ends=ends))
    def check(program: Program) -> None:
        run(program, route)

    check()
