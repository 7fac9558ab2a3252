"""The checks for the first hour on hardware, of which the simulated device can pass most."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.gpu_checks import CHECKS, Check
from tools.gpu_first_hour import run_check

QUICK = [check for check in CHECKS if check.question.startswith(("4. Another", "7. ", "9. ", "10. ", "14. ", "16. "))]


@pytest.mark.parametrize("check", QUICK, ids=[check.question[:2] for check in QUICK])
def test_a_check_passes(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_COUNT", "3")
    assert run_check(check, 3, tmp_path)[1] == "passed"
