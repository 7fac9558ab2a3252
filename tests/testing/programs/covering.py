"""Tests of `covered`, which they import in ranks alone."""

from __future__ import annotations

import importlib
import os

import pytest


@pytest.mark.ranks(2)
def test_ranks() -> None:
    covered = importlib.import_module("covered")
    assert covered.of_ranks(int(os.environ["RANK"])) in {"zero", "other"}
