"""The programs of the originals' users, as they are but for the line that imports the original."""

from __future__ import annotations

from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
REPLACED = {
    "from virtex.utils import distributed as dist": "from rankwise.compat import virtex as dist",
    "from vis4d.common.distributed import": "from rankwise.compat.vis4d import",
    "from mmcv.runner import": "from rankwise.compat.mmcv import",
}


def adapted(name: str, folder: Path) -> str:
    """Write a program with its one line changed into a folder, and return its path."""
    text = (PROGRAMS / name).read_text()
    (original,) = [line for line in REPLACED if line in text]
    path = folder / name
    path.write_text(text.replace(original, REPLACED[original]))
    return str(path)
