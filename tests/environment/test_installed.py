"""Launchers that other packages add by entry points, in packages that are installed into a folder."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rankwise as rw
from rankwise._environment.detect import LAUNCHERS
from tests.session.worlds import clean_environ, free_port

HOROVOD = """
from rankwise.extend.launchers import LaunchEnvironment, read_int, require_int

class Horovod:
    name = "horovod"
    description = "horovodrun"

    def present(self, environ):
        return "HOROVOD_RANK" in environ

    def read(self, environ):
        because = "HOROVOD_RANK is: horovodrun sets both"
        return LaunchEnvironment(
            launcher=self.name,
            rank=require_int(environ, "HOROVOD_RANK", because=because),
            world_size=require_int(environ, "HOROVOD_SIZE", because=because),
            local_rank=read_int(environ, "HOROVOD_LOCAL_RANK"),
        )
"""
UNUSABLE = """
class Launcher:
    description = "of a test"
    def __init__(self, name="raises"): self.name = name
    def present(self, environ): raise KeyError("no variables")
    def read(self, environ): return 1 / 0

class WithoutRead:
    name, description, present = "incomplete", "of a test", None

another = Launcher("other")

class Reader(Launcher):
    def present(self, environ): return "WRONG" in environ
    def read(self, environ):
        if environ["WRONG"] == "raise":
            raise ValueError("no number")
        return 3

wrong = Reader("wrong")
"""
HOROVOD_VARIABLES = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1"}


def install(folder: Path, package: str, module: str, source: str, **launchers: str) -> None:
    """Install a package of one module, as a wheel is installed: the module, and the folder of its metadata."""
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in launchers.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[rankwise.launchers]", *lines, ""]))


def run(folder: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    environ = clean_environ(PYTHONPATH=str(folder), **variables)
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)


def test_a_launcher_of_another_package_is_recognized(tmp_path: Path) -> None:
    install(tmp_path, "horovod-for-rankwise", "horovod_launcher", HOROVOD, horovod="horovod_launcher:Horovod")
    program = """
        import os, sys
        import rankwise as rw

        assert "horovod_launcher" not in sys.modules
        print(rw.get_rank(), rw.get_world_size(), rw.get_local_rank())
        assert "torch" not in sys.modules
        names = [launcher.name for launcher in rw.launchers()]
        print(*names)
        print(rw.launchers()[4].description)
        horovod = {name: os.environ[name] for name in os.environ if name.startswith("HOROVOD")}
        by_hand = {"RANK": "0", "WORLD_SIZE": "2"}
        torchrun = by_hand | {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
        override = {"RANKWISE_RANK": "3", "RANKWISE_WORLD_SIZE": "8"}
        for more in (by_hand, torchrun, {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, override):
            print(rw.detect(horovod | more).launcher)
        print(rw.detect(horovod | override).local_rank)
        print(rw.detect({**horovod, "HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"}).launcher)
        print(rw.detect(horovod | by_hand, "plain").rank, rw.detect(horovod, "horovod").rank)
        for environ in ({"HOROVOD_RANK": "3"}, horovod | {"HOROVOD_RANK": "9"}):
            try:
                rw.detect(environ)
            except rw.LauncherEnvironmentError as error:
                print(error)
    """
    ended = run(tmp_path, program, **HOROVOD_VARIABLES)
    assert ended.stderr == ""
    contradiction = "rank 9 (from HOROVOD_RANK) is not below world_size 8 (from HOROVOD_SIZE)"
    assert ended.stdout.splitlines() == [
        "3 8 1",
        " ".join(
            name for own in LAUNCHERS for name in ((own.name, "horovod") if own.name == "torchrun" else (own.name,))
        ),
        "horovodrun (of the package horovod-for-rankwise)",
        "horovod",
        "torchrun",
        "horovod",
        "override",
        "1 (from HOROVOD_LOCAL_RANK)",
        "horovod",
        "0 (from RANK) 3 (from HOROVOD_RANK)",
        "HOROVOD_SIZE is not set, but HOROVOD_RANK is: horovodrun sets both",
        "the variables of launcher 'horovod' contradict each other: " + contradiction,
    ]


@pytest.mark.slow
def test_ranks_of_such_a_launcher_join(tmp_path: Path) -> None:
    install(tmp_path, "horovod-for-rankwise", "horovod_launcher", HOROVOD, horovod="horovod_launcher:Horovod")
    code = f"""
        import rankwise as rw
        with rw.init(address="127.0.0.1:{free_port()}"):
            print(rw.all_reduce(rw.get_rank()), rw.explain().split()[1])
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=clean_environ(PYTHONPATH=str(tmp_path), HOROVOD_RANK=str(rank), HOROVOD_SIZE="2"),
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.communicate(timeout=200)[0] for rank in ranks] == ["1 horovod\n"] * 2


@pytest.mark.slow
def test_one_that_cannot_be_used_is_an_error_only_for_those_who_name_it(tmp_path: Path) -> None:
    install(
        tmp_path, "some-launchers", "unusable", UNUSABLE,
        absent="unusable:No", incomplete="unusable:WithoutRead", misnamed="unusable:another",
        missing="nosuchmodule:Launcher", openmpi="unusable:Launcher", raises="unusable:Launcher",
        wrong="unusable:wrong",
    )  # fmt: skip
    program = """
        import rankwise as rw

        print(rw.get_rank(), rw.all_reduce(1))
        for environ, launcher in (
            *(({}, name) for name in ("absent", "incomplete", "misnamed", "missing", "raises")),
            ({"WRONG": "raise"}, "auto"),
            ({"WRONG": "type"}, "auto"),
        ):
            try:
                rw.detect(environ, launcher)
            except rw.RankwiseError as error:
                print(type(error).__name__, error)
    """
    ended = run(tmp_path, program)
    package = "of the package some-launchers"
    unusable, unread = f"{package} cannot be used:", f"{package} cannot read its variables: read()"
    assert ended.stdout.splitlines() == [
        "0 1",
        f"InvalidArgumentError launcher 'absent' {unusable} AttributeError: module 'unusable' has no attribute 'No'",
        f"InvalidArgumentError launcher 'incomplete' {unusable} TypeError: WithoutRead has no method `present`",
        f"InvalidArgumentError launcher 'misnamed' {unusable} TypeError: its name is 'other', not 'misnamed'",
        f"InvalidArgumentError launcher 'missing' {unusable} ModuleNotFoundError: No module named 'nosuchmodule'",
        f"LauncherEnvironmentError launcher 'raises' {unread} raised ZeroDivisionError: division by zero",
        f"LauncherEnvironmentError launcher 'wrong' {unread} raised ValueError: no number",
        f"LauncherEnvironmentError launcher 'wrong' {unread} returned 3, not a LaunchEnvironment",
    ]
    warned = ended.stderr.splitlines()
    assert all("of the package some-launchers is ignored: " in line for line in warned)
    for text in ("'openmpi'", "'absent'", "'incomplete'", "'misnamed'", "'missing'", "'raises'"):
        assert sum(text in line for line in warned) == 1, warned
    assert len(warned) == 6


def test_a_rank_of_rankwise_launch_does_not_look_for_them(tmp_path: Path) -> None:
    """The launchers before them in the order are recognized without a scan of the installed packages."""
    code = "import sys, rankwise as rw; print(rw.get_rank(), 'importlib.metadata' in sys.modules)"
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert run(tmp_path, code, **variables).stdout == "1 False\n"


def test_the_table_is_in_the_order_of_detection() -> None:
    assert [launcher.name for launcher in rw.launchers()] == [launcher.name for launcher in LAUNCHERS]
    assert all(launcher.description for launcher in rw.launchers())
    assert rw.launchers()[-1].present({})
