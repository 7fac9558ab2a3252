"""Groups in the forms that Ignite takes: a list of ranks, or a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

import rankwise
from rankwise import Group, Session
from rankwise.compat.ignite._identity import joined_session
from rankwise.errors import InvalidArgumentError, PayloadTypeError
from rankwise.extend._dropins import current_session, group_of_members, integer, new_process_group, world_group
from rankwise.extend.collectives import collective

# The groups of each session that were passed as lists of ranks, by their ranks.
_groups_by_session: WeakKeyDictionary[Group, dict[tuple[int, ...], Group]] = WeakKeyDictionary()


def new_group(ranks: list[int], **kwargs: Any) -> Any:  # noqa: ANN401 - Ignite's signature
    """Return a process group of some of the ranks, for the `group` argument of other functions; alone, the list itself.

    Collective over the world. Every rank calls it, member or not, with the same ranks. A rank that is not a member gets
    torch's placeholder, which the functions here take too. Each call makes a new group.

    Args:
        ranks: The members' ranks.
        kwargs: For `torch.distributed.new_group`: `backend`, `pg_options`, `timeout`. None of them on XLA devices.

    Raises:
        InvalidArgumentError: `ranks` is not a list of ranks, or another argument cannot be used.
        MismatchError: The ranks passed different lists.
        CollectiveError: A rank ended, or did not arrive within the session's timeout.

    Example:
        >>> new_group([0])
        [0]
    """
    session = joined_session()
    if session is None:
        if not _is_list_of_ranks(ranks):
            raise _not_ranks_error(ranks)
        return ranks
    if not _is_list_of_ranks(ranks):
        fail_collective(world_group(session), "new_group", _not_ranks_error(ranks))
    if kwargs and session.group is None:
        error = InvalidArgumentError(f"new_group takes no {', '.join(sorted(kwargs))} on XLA devices")
        fail_collective(world_group(session), "new_group", error)
    if kwargs:
        return dist.new_group(sorted(map(int, ranks)), **kwargs)
    made = rankwise.new_group(ranks)  # checks that all ranks pass the same list
    if session.group is None:
        return made
    made.close()
    process_group = new_process_group(made.ranks, session)
    return dist.GroupMember.NON_GROUP_MEMBER if process_group is None else process_group


def member_group(session: Session, group: Any) -> Group | dist.ProcessGroup | None:  # noqa: ANN401 - any value of the user's
    """Return the group that is given in any of its forms; None if this rank is not a member.

    Collective over the ranks of a list that is passed for the first time; Local otherwise.

    Raises:
        InvalidArgumentError: The value is not a group.
        CollectiveError: A rank of a new list ended, or did not arrive in time.
    """
    if group is None or group is session.group:
        return world_group(session)
    if isinstance(group, Group):
        return group if group.rank is not None else None
    if _is_list_of_ranks(group):
        return _group_of_ranks(session, tuple(sorted(map(int, group))))
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if isinstance(group, dist.ProcessGroup):
        return group
    return fail_collective(world_group(session), "a group", _not_a_group_error(group))


def rank_not_in_group(group: Any) -> bool:  # noqa: ANN401 - any value of the user's
    """Return whether this rank is outside of a group, in any of its forms.

    Local.

    Raises:
        InvalidArgumentError: The value is not a group.

    Example:
        >>> rank_not_in_group([0])
        False
    """
    session = current_session()
    if session is None or group is None:
        return False
    if isinstance(group, Group):
        return group.rank is None
    if _is_list_of_ranks(group):
        return session.rank not in group
    if group != dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, dist.ProcessGroup):
        raise _not_a_group_error(group)
    return dist.get_rank(group) < 0


def _group_of_ranks(session: Session, ranks: tuple[int, ...]) -> Group | None:
    if not ranks or len(set(ranks)) != len(ranks) or not 0 <= ranks[0] <= ranks[-1] < session.world_size:
        error = InvalidArgumentError(
            f"Argument group should be list of int, each a rank of {session.world_size} and there once; got "
            f"{list(ranks)}"
        )
        fail_collective(world_group(session), "a group", error)
    if session.rank not in ranks:
        return None
    if len(ranks) == session.world_size:
        return world_group(session)
    known = _groups_by_session.setdefault(world_group(session), {})
    if ranks not in known:
        known[ranks] = group_of_members(ranks, session)
    return known[ranks]


def fail_collective(group: Group | dist.ProcessGroup, operation: str, error: Exception) -> NoReturn:
    """Raise an error of this rank, and report it to the others, which would wait for this rank."""
    with collective(operation, group=group):
        raise error


def fail_unsupported_type(group: Group | dist.ProcessGroup | None, operation: str, value: object) -> NoReturn:
    """Raise that a function does not take values of this type."""
    error = PayloadTypeError(f"Unhandled input type {type(value)}: {operation} does not take it")
    if group is None:
        raise error
    fail_collective(group, operation, error)


def _is_list_of_ranks(group: object) -> bool:
    return (
        isinstance(group, Sequence)
        and not isinstance(group, (str, bytes))
        and all(integer(rank) is not None for rank in group)
    )


def _not_a_group_error(group: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Argument group should be list of int or ProcessGroup, got {type(group)}, group={group!r}; make one with "
        "new_group(ranks)"
    )


def _not_ranks_error(ranks: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"Argument ranks should be list of int, got {ranks!r}")
