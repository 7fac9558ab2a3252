"""GroupRank: a rank within a group, where a number would be a global rank."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise._arguments import as_integer
from rankwise.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class GroupRank:
    """A rank within a group, where a number is a global rank: `src=GroupRank(1)` is the second member of the group.

    For the arguments `src` and `dst` of collectives. Some ranks may pass a member as a `GroupRank` and others as its
    global rank.

    Args:
        index: The group rank, from 0: an index of `Group.ranks`.

    Raises:
        InvalidArgumentError: `index` is not an integer, or negative.

    Example:
        >>> import rankwise
        >>> with rankwise.new_group([rankwise.get_world_size() - 1]) as group:
        ...     if group.rank is not None:
        ...         rankwise.broadcast("from the first member", src=GroupRank(0), group=group)
        'from the first member'
    """

    index: int

    def __post_init__(self) -> None:
        index = as_integer(self.index, "GroupRank")
        if index < 0:
            raise InvalidArgumentError(f"GroupRank({index}) is negative; group ranks begin at 0")
        object.__setattr__(self, "index", index)

    def __repr__(self) -> str:
        return f"GroupRank({self.index})"
