"""The inventories to which the site links, made anew from those of the documentations of Python and torch.

    python -m tools.inventories
    python -m tools.inventories collections.abc.Set torch.optim.Optimizer

Those in docs/inventories have only the names that docstrings need, as text, so that `make docs` needs no network: this
program does. It writes the names that are there, and those that are given, with the pages that they are on now.
"""

from __future__ import annotations

import sys
import urllib.request
import zlib
from pathlib import Path
from typing import Final

FOLDER = Path(__file__).parents[1] / "docs" / "inventories"
SOURCES: Final = {
    "python": "https://docs.python.org/3/objects.inv",
    "torch": "https://docs.pytorch.org/docs/stable/objects.inv",
}


def trimmed(inventory: bytes, names: set[str]) -> list[str]:
    """Return a line for each of these names that an inventory of Sphinx's second version has."""
    *_head, body = inventory.split(b"\n", 4)
    lines = []
    for line in zlib.decompress(body).decode().splitlines():
        name, kind, _priority, place, *_title = line.split(" ")
        if name in names and kind.startswith("py:"):
            page, _, anchor = place.partition("#")
            if anchor in {"$", name}:  # the only ones that the first version, which is text, can have
                lines.append(f"{name} {kind.removeprefix('py:')} {page.replace('$', name)}")
    return sorted(lines)


def main() -> None:
    for file, source in SOURCES.items():
        path = FOLDER / f"{file}.inv"
        head, entries = path.read_text().splitlines()[:3], path.read_text().splitlines()[3:]
        own = [name for name in sys.argv[1:] if name.startswith("torch") == (file == "torch")]
        wanted = {entry.partition(" ")[0] for entry in entries} | set(own)
        with urllib.request.urlopen(source, timeout=60) as reply:  # noqa: S310 - of the table above
            lines = trimmed(reply.read(), wanted)
        for name in sorted(wanted - {line.partition(" ")[0] for line in lines}):
            sys.exit(f"{source} has no {name}")
        path.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
