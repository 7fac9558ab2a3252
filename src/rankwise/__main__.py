"""`python -m rankwise`: the command, where its script is not on PATH."""

from __future__ import annotations

from rankwise.cli.main import main

if __name__ == "__main__":
    main(prog_name="rankwise")
