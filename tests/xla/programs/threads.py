"""Run a script as `python SCRIPT ARGS` on each device of this process, with the support for collectives on the CPU."""

from __future__ import annotations

import runpy
import sys

from tests.xla.cpu_devices import run_ranks


def main() -> None:
    del sys.argv[0]
    run_ranks(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))


if __name__ == "__main__":
    main()
