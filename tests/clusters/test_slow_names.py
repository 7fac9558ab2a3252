"""A host whose name server does not answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.worlds import PROGRAMS, clean_environ, free_port

HERE = Path(__file__).parent


@pytest.mark.rare
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "mount"))),
    reason="not root, or no unshare, ip or mount: a network namespace cannot be made",
)
def test_a_slow_lookup_of_names_delays_joining_and_is_named(tmp_path: Path) -> None:
    """Torch's store looks up the name of each address that it connects to; joining used to give up after 10 s of it."""
    environ = clean_environ(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    del environ["RES_OPTIONS"]
    command = ["unshare", "--net", "--mount", "sh", str(HERE / "silent_name_server.sh"), str(tmp_path)]
    join = [str(PROGRAMS / "join.py"), "100"]
    ended = subprocess.run(
        [*command, sys.executable, str(HERE / "programs" / "two_ranks.py"), *join],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(json.loads(line)["rank"] for line in ended.stdout.splitlines()) == [0, 1]
    assert ended.stderr.count("joining is slow: torch looks up the name of 127.0.0.1 (reverse DNS)") == 2
