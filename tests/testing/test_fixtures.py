"""The fixture `session`, also named `world`, beside fixtures of these names in a project or in another plugin."""

from __future__ import annotations

import pytest

from tests.lanes import variants

PLUGIN = """
import pytest

@pytest.fixture(scope="module")
def session():
    return "the other plugin's"
"""
TEST = """
import pytest

@pytest.mark.ranks("serial", 2)
def test_it(session, world):
    assert session == {session!r}
    assert world.world_size in (1, 2)

def test_outside_of_ranks(session):
    assert session == {session!r}
"""


def run(programs: pytest.Pytester, *args: str) -> pytest.RunResult:
    return programs.runpytest_subprocess("-p", "no:cacheprovider", *args, timeout=100)


@pytest.mark.slow
def test_both_names_are_one_session(programs: pytest.Pytester) -> None:
    programs.makepyfile(
        """
        import pytest
        import rankwise as rw

        @pytest.mark.ranks("serial", 1, 2)
        def test_it(session, world):
            assert isinstance(session, rw.Session)
            assert session is world
            assert rw.all_gather(session.rank) == list(range(session.world_size))

        @pytest.mark.ranks(2)
        def test_alone(session):
            assert rw.all_reduce(session.rank) == 1

        def test_without_marker(session):
            assert session.world_size == 1
        """
    )
    run(programs).assert_outcomes(passed=5)


@pytest.mark.slow
def test_the_fixtures_of_a_project_come_first(programs: pytest.Pytester) -> None:
    programs.makeconftest("import pytest\n@pytest.fixture\ndef session():\n    return 'the project'")
    programs.makepyfile(
        test_project=TEST.format(session="the project"),
        test_world="""
            import pytest
            import rankwise as rw

            @pytest.fixture
            def session(session):
                return session.upper()

            @pytest.fixture
            def world():
                return {"size": 3}

            @pytest.mark.ranks(2)
            def test_it(session, world):
                assert (session, world) == ("THE PROJECT", {"size": 3})
        """,
    )
    run(programs).assert_outcomes(passed=4)


@pytest.mark.slow
def test_a_project_may_extend_the_session(programs: pytest.Pytester) -> None:
    programs.makeconftest("import pytest\n@pytest.fixture\ndef session(session):\n    return session, session.rank")
    programs.makepyfile(
        """
        import pytest

        @pytest.mark.ranks(2)
        def test_it(session, world):
            assert session == (world, world.rank)
        """
    )
    run(programs).assert_outcomes(passed=1)


@pytest.mark.parametrize("is_first", variants([True, False], slow=[True]))
def test_the_fixture_of_another_plugin_comes_first(programs: pytest.Pytester, *, is_first: bool) -> None:
    """pytest loads `-p` before the plugins that are installed, and `pytest_plugins` after them."""
    programs.makepyfile(other_plugin=PLUGIN, test_it=TEST.format(session="the other plugin's"))
    if not is_first:
        programs.makeconftest("pytest_plugins = ['other_plugin']")
    run(programs, *(["-p", "other_plugin"] if is_first else [])).assert_outcomes(passed=3)
