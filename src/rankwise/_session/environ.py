"""The variables of this process: the only module that reads `os.environ`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from rankwise._environment.detect import detect
from rankwise._environment.facts import LaunchEnvironment
from rankwise.errors import LauncherEnvironmentError

log = logging.getLogger(__name__)


def own_environment() -> LaunchEnvironment:
    """Read the launch environment of this process.

    Local.
    """
    return detect(os.environ)


def read_environment(launcher: str = "auto", environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read the launch environment from these variables or `os.environ`, and log its warnings.

    Local.
    """
    reading = detect(os.environ if environ is None else environ, launcher)
    for warning in reading.warnings:
        log.warning("%s", warning)
    return reading


def read_check(environ: Mapping[str, str] | None = None) -> bool:
    """Read RANKWISE_CHECK: whether single tensors on accelerators are checked too.

    Local.

    Raises:
        LauncherEnvironmentError: It is neither 0 nor 1.
    """
    value = (os.environ if environ is None else environ).get("RANKWISE_CHECK", "").strip()
    if value not in {"", "0", "1"}:
        raise LauncherEnvironmentError(f"RANKWISE_CHECK={value!r} is neither 0 nor 1")
    return value == "1"
