"""launch(fn) with `fn` defined in the main script: its definitions in ranks, and the results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rankwise
from tests.lanes import variants
from tests.session.worlds import clean_environ

PROGRAMS = Path(__file__).parent / "programs"
OPTIONS = ["-O", "-W", "ignore:nothing", "-X", "int_max_str_digits=5000"]


def run(*args: str, cwd: Path = PROGRAMS, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=clean_environ(**environ), capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip


WAYS = {
    "script": ["caller.py"],
    "module": ["-m", "programs.caller"],
    "archive": ["caller.pyz"],
    "-c": ["-c", (PROGRAMS / "caller.py").read_text()],
}


@pytest.mark.parametrize("way", variants(WAYS, slow={"script"}))
def test_ranks_find_the_definitions_and_effects_of_the_script(way: str, tmp_path: Path) -> None:
    """Where there is no module to import, all but the effects of its top level."""
    if way == "archive":
        shutil.copy(PROGRAMS / "caller.py", tmp_path / "__main__.py")
        subprocess.run([sys.executable, "-m", "zipapp", ".", "-o", "caller.pyz"], cwd=tmp_path, check=True)
    cwd = {"archive": tmp_path, "module": PROGRAMS.parent}.get(way, PROGRAMS)
    has_file = way in {"script", "module"}  # which workers of a loader can import too
    ended = run(*OPTIONS, *WAYS[way], "--lr", "0.1", *(["load"] if has_file else []), cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    (zero, one, *loaded), came_back = json.loads(ended.stdout)
    assert came_back == [True] * 3
    assert zero == one
    assert zero.pop("argv")[:2] == ["--lr", "0.1"]
    assert zero.pop("flags") == [1, ["ignore:nothing"], 5000]
    effects = zero.pop("effects")
    if way != "-c":
        assert effects == ["torch.float64", 20, ["look"]]
    assert (zero.pop("set later"), zero.pop("also"), zero.pop("module")) == ("set below the guard", 5, "__main__")
    assert zero.pop("pickled") == [True, True]
    assert zero == {"saved": True, "gathered": True, "broadcast": True}
    assert loaded == ([[3.0]] if has_file else [])


@pytest.mark.slow
def test_children_of_every_start_method_start_ranks() -> None:
    ended = run("nested.py")
    assert ended.stdout.splitlines() == [f"{method} [10, 11] True" for method in ("spawn", "forkserver", "fork")] + [
        "3"
    ], ended.stderr


@pytest.mark.slow
def test_a_script_that_guards_nothing_is_not_imported() -> None:
    ended = run("unguarded.py")
    assert ended.stdout == "[0, 20] True\n", ended.stderr


@pytest.mark.slow
def test_a_script_that_starts_ranks_when_it_is_imported_is_an_error() -> None:
    """And the ranks do not start ranks of their own, and so on."""
    ended = run("unguarded.py", "also when imported")
    assert ended.returncode == 1
    assert 'put the call that starts them below if __name__ == "__main__":' in ended.stderr
    assert ended.stdout == ""


@pytest.mark.slow
def test_packages_that_only_the_caller_finds_are_found_by_ranks(tmp_path: Path) -> None:
    """As in a notebook that puts a folder first in `sys.path`: its modules do not replace those of all processes."""
    (tmp_path / "vendored").mkdir()
    (tmp_path / "vendored" / "rankwise").symlink_to(Path(rankwise.__file__).parent)
    (tmp_path / "vendored" / "selectors.py").write_text("raise ImportError('not this one')\n")
    outside = [entry for entry in sys.path if "packages" in entry]
    code = (
        f"import selectors, sys; sys.path[:0] = [{str(tmp_path / 'vendored')!r}]; sys.path += {outside!r}\n"
        "import rankwise; print(rankwise.launch(lambda: rankwise.__file__, nproc=1))"
    )
    ended = run("-S", "-c", code)
    assert ended.stdout == f"{[str(tmp_path / 'vendored' / 'rankwise' / '__init__.py')]}\n", ended.stderr
