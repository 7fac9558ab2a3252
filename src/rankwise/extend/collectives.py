"""Collectives of other packages, with the contract of rankwise's own.

A collective is a function that every member of a group calls, and that runs a `collective` block:

- An exception in the block, on any member, is raised on all: the original there, `RemoteRankError` on the others, at
  the latest in their next collective in the group. No member is left waiting, and the next call works.
- Members that call different collectives, or pass other `settings` or `values`, raise `MismatchError`, which names
  both calls and their lines. A member that is dead or does not come is a `CollectiveError`.

So everything that can fail on one member alone (checks, files, conversions) belongs into the block, before the exchange
of data that follows it. A world of one runs the same code.

Example, a checkpoint of which each rank reads its part, if all parts are there:
    >>> from pathlib import Path
    >>> def read_parts(folder, *, group=None):
    ...     with collective("read_parts", settings={"folder": str(folder)}, group=group) as members:
    ...         part = Path(folder, f"part{members.rank}").read_bytes()  # an OSError is raised on all ranks
    ...         sizes = [int(size) for size in members.all_gather_bytes(b"%d" % len(part))]
    ...     return part, sizes
    >>> read_parts("/nonexistent")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: '/nonexistent/part0'
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rankwise._arguments import as_text
from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.pytree import describe
from rankwise._comm.group_rank import GroupRank
from rankwise._training.rank_control import one_rank_first as one_member_first
from rankwise._user_frames import site_of_caller
from rankwise.extend._members import MAX_MESSAGE_BYTES, Members, checked_mapping

__all__ = ["MAX_MESSAGE_BYTES", "Members", "collective", "describe", "one_rank_first"]


def collective(
    name: str,
    *,
    settings: Mapping[str, object] | None = None,
    values: Mapping[str, str] | None = None,
    group: GroupLike | None = None,
) -> Members:
    """Return a context manager in which this rank takes part in a collective; it gives the `Members`.

    Collective over the session, or over `group`. A block that exchanges nothing communicates only if it raises: the
    other members raise `RemoteRankError` in their next collective in the group. So checks may stand in a block of their
    own, before a collective of rankwise.

    Args:
        name: The name of the collective in error messages: that of the function that users call. Their line is the one
            from which the function with the block was called.
        settings: Arguments that have to be the same on all members, by name. They are compared as `repr` shows them.
        values: Descriptions of values that have to match, such as `describe(tensor)`, by name or path.
        group: The group whose members take part: a `Group`, or a mesh or process group of torch; all ranks by default.

    Raises:
        InvalidArgumentError: An argument is not as above; or, by the block, this rank is not a member of the group.
        CollectiveError: By the block: this rank is in another collective of the group.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> with collective("agree_on", settings={"seed": 7}) as members:
        ...     members.verify()
        ...     members.size
        1
    """
    return Members(comm_of(group), group, as_text(name, "name"), settings, values, site_of_caller(sys._getframe(1)))  # noqa: SLF001 - as call_site


@contextmanager
def one_rank_first(
    name: str,
    rank: int | GroupRank = 0,
    *,
    settings: Mapping[str, object] | None = None,
    group: GroupLike | None = None,
) -> Iterator[None]:
    """Run a block on one rank, and then on the others, as `rankwise.rank_zero_first` does.

    Collective over the session, or over `group`. The others wait without a timeout, until the block on that rank ends
    or raises. The block must not call collectives.

    Args:
        name: The name of the function in error messages.
        rank: The global rank that runs the block first.
        settings: Arguments that have to be the same on all members, by name.
        group: The group whose members take part: a `Group`, or a mesh or process group of torch; all ranks by default.

    Raises:
        InvalidArgumentError: `rank` is not a member.
        RemoteRankError: The block failed on that rank; raised on the others, which do not run it.
        CollectiveError: That rank is dead.

    Example:
        >>> with one_rank_first("read_cached"):
        ...     data = "downloaded, or found in the cache"
    """
    comm = comm_of(group)
    call = comm.call(as_text(name, "name"), {"rank": rank, **checked_mapping(settings, "settings")})
    with one_member_first(comm, call, rank):
        yield
