"""Where projects keep their tests: ranks find the same fixtures there as pytest's own process."""

from __future__ import annotations

import textwrap

import pytest

from tests.testing.running import failure_report

OUTER = """
import pytest

@pytest.fixture
def folders():
    return [{name!r}]
"""
INNER = """
import pytest

@pytest.fixture
def folders(folders):
    return [*folders, {name!r}]
"""
TEST = """
import pytest

@pytest.mark.ranks("serial", 2)
def test_fixture(world, folders):
    assert folders == {folders}
"""


def write(programs: pytest.Pytester, path: str, text: str) -> None:
    file = programs.path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        # pytest reads conftest.py there, and in folders in it that are called test*
        pytest.param(["tests"], marks=pytest.mark.rare),
        ["tests/test_b/deep", "tests/test_b", "tests/test_a"],
    ],
    ids=["all", "each"],
)
def test_fixtures_of_a_folder(programs: pytest.Pytester, args: list[str]) -> None:
    for folder in (["test_a"], ["test_b"], ["test_b", "deep"]):
        path = "/".join(["tests", *folder])
        write(programs, f"{path}/conftest.py", (INNER if folder[1:] else OUTER).format(name=folder[-1]))
        write(programs, f"{path}/test_same_name.py", TEST.format(folders=folder))
    result = programs.runpytest_subprocess("-p", "no:cacheprovider", "--import-mode=importlib", *args, timeout=150)
    result.assert_outcomes(passed=6)


@pytest.mark.slow
def test_a_file_that_pytest_would_not_find_by_itself(programs: pytest.Pytester) -> None:
    write(
        programs,
        "checks.py",
        """
        import pytest

        @pytest.mark.ranks(2)
        def test_it(world):
            assert [world.world_size] == [3]
        """,
    )
    result = programs.runpytest_subprocess("-p", "no:cacheprovider", "checks.py", timeout=150)
    assert failure_report(result, "test_it").startswith("0 of 2 ranks passed\nranks 0-1 failed: assert [2] == [3]")
