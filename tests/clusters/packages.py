"""Programs of Debian's packages, which are installed where they are missing, if this process may."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping


def why_not(packages: Mapping[str, str]) -> str:
    """Return why some programs cannot be had here, or "". Installs their packages if they are missing.

    Args:
        packages: The package of each program.
    """
    missing = [package for program, package in packages.items() if which(program) is None]
    if not missing:
        return ""
    if os.geteuid() != 0:
        return f"{', '.join(missing)} are missing, and this process is not root"
    if shutil.which("apt-get") is None:
        return f"{', '.join(missing)} are missing, and there is no apt-get"
    install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing]
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (install, ["apt-get", "update", "-qq"], install):
        ended = subprocess.run(command, check=False, env=environ, capture_output=True, timeout=180)
        if command is install and ended.returncode == 0:
            return ""
    return f"{', '.join(missing)} could not be installed: {ended.stderr.decode()[-200:]}"


def which(program: str) -> str | None:
    """Return the path of a program, or None."""
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
