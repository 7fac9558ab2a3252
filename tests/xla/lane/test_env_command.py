"""`rankwise env` where torch_xla is installed."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rankwise.cli.main import main
from tests.xla.device_ranks import DEVICES


def test_the_command_shows_the_devices() -> None:
    shown = CliRunner().invoke(main, ["env"])
    assert shown.exit_code == 0
    facts = {line.split()[0]: line.split()[1] for line in shown.output.splitlines() if line}
    assert facts["torch_xla"].startswith("2.9")
    assert (facts["xla_device"], facts["xla_devices"]) == ("CPU", str(DEVICES))


def test_an_unreadable_number_of_devices_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM_DEVICES", "many")
    failed = CliRunner().invoke(main, ["env"])
    assert failed.exit_code == 1
    assert "CPU_NUM_DEVICES='many' is not a whole number" in failed.output
