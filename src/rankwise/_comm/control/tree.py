"""The tree of the leaders of units; a unit is the ranks of a host that agree through one page. No I/O."""

from __future__ import annotations

from typing import Final

# With 16,384 ranks on hosts of 8 the tree has three steps, and no leader talks to more than 17 others.
FAN_OUT: Final = 16


class Tree:
    """The tree of the units of a group, by their numbers; the first one is the root."""

    def __init__(self, size: int) -> None:
        self.size = size

    def parent(self, unit: int) -> int | None:
        """Return the parent of a unit; None for the root."""
        return (unit - 1) // FAN_OUT if unit else None

    def children(self, unit: int) -> range:
        """Return the children of a unit."""
        first = unit * FAN_OUT + 1
        return range(first, max(first, min(first + FAN_OUT, self.size)))

    def neighbours(self, unit: int) -> list[int]:
        """Return the parent of a unit, and its children."""
        parent = self.parent(unit)
        return [*([] if parent is None else [parent]), *self.children(unit)]
