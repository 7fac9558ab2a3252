"""What is promised to jobs of many hosts, with real ranks: each eight of them are a host as far as they know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.worlds import clean_environ, free_port

PROGRAM = Path(__file__).parent / "programs" / "many_hosts.py"


@pytest.mark.slow
def test_128_ranks_on_16_hosts() -> None:
    """Two launchers start them. A rank that differs, fails, is late or dead is named by all others."""
    common = [sys.executable, "-m", "rankwise", "launch", "-n", "64", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    common += ["--master-port", str(free_port())]
    launchers = [
        subprocess.Popen(
            [*common, "--node-rank", str(number), str(PROGRAM), "8"],
            env=clean_environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in (0, 1)
    ]
    outputs = [launcher.communicate(timeout=250)[0] for launcher in launchers]
    shown = [line.partition("] ") for line in "\n".join(outputs).splitlines() if "no secret" not in line]
    found = [text for rank, _, text in shown if rank == "[ 0"]
    expected = ["joined", "15 connections at most", "mismatch", "one rank", "1 missing", "64 missing", "dead"]
    assert found == expected, outputs
    assert not [text for rank, _, text in shown if text and rank != "[ 0"], outputs
    assert "rank 65 of 128" in outputs[0]
    assert "was killed by SIGKILL" in outputs[0]
