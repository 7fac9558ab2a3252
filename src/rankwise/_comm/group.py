"""Group: the handle that users have of a group of ranks. The operations are in `comm`, and users do not reach them."""

from __future__ import annotations

import importlib
import inspect
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from rankwise._comm.comm import Comm
from rankwise._user_frames import strip_internal_frames
from rankwise.errors import InvalidArgumentError, PayloadTypeError, RankwiseError, shown


class Group:
    """A group of ranks, in an order, for the `group` argument of collectives.

    Made by `rankwise.new_group()` and `rankwise.node_group()`. A context manager, closed on exit. A group belongs to
    its process, and is equal to itself only.
    """

    __slots__ = ("__weakref__", "_close_refusal", "_comm")

    def __init__(self, comm: Comm, *, close_refusal: str = "") -> None:
        if not isinstance(comm, Comm):
            raise InvalidArgumentError(f"Group({shown(comm)}): groups are made by rankwise.new_group(ranks)")
        self._comm = comm
        self._close_refusal = close_refusal

    @property
    def rank(self) -> int | None:
        """The group rank of this process, an index of `ranks`; None if it is not a member."""
        return self._comm.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the members, in the order of gathered results."""
        return tuple(self._comm.ranks)

    @property
    def size(self) -> int:
        """The number of members."""
        return self._comm.size

    @property
    def backend(self) -> str | None:
        """The backends of the group, as torch writes them; None alone, and if this rank is not a member."""
        return self._comm.planes.backend

    def __repr__(self) -> str:
        member = "not a member" if self.rank is None else f"rank {self.rank}"
        return f"<{type(self).__name__} of {self.size} ranks, {member}{', closed' if self._comm.closed else ''}>"

    if not TYPE_CHECKING:  # to a type checker, every attribute would exist

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            # Imported by name, since this package is below the public functions.
            function = None if name.startswith("_") else getattr(importlib.import_module("rankwise"), name, None)
            if inspect.isfunction(function) and "group" in inspect.signature(function).parameters:
                text += f"; call rankwise.{name}(..., group=group)"
            raise AttributeError(text, name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise PayloadTypeError(
            "a group belongs to its process, and cannot be pickled or copied; pass its ranks, and call "
            "rankwise.new_group(ranks) there"
        )

    def close(self) -> None:
        """Close a group: release its connections and its process group.

        Collective over the group: returns when every member has called it. On other ranks it is Local. Closing a closed
        group does nothing, nor does closing a group after the end of its session, which closes all of its groups. As a
        context manager, a group is closed at the end of the block; if the block raises, without waiting for the others.

        Raises:
            InvalidArgumentError: `node_group()` or `one_per_node_group()` has made it: it is closed with its session.
            MismatchError: Another member makes a different call. The group stays open.
            CollectiveTimeoutError: Not all members came in time. The group stays open.
            CollectiveError: A member is gone. The group is closed on this rank.
        """
        self._require_closable()
        try:
            self._comm.close()
        except RankwiseError as error:
            strip_internal_frames(error.__traceback__, error)
            raise

    def __enter__(self) -> Self:
        self._require_closable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._comm.leave(error)

    def _require_closable(self) -> None:
        """Check that users may close this group.

        Raises:
            InvalidArgumentError: It is closed with its session.
        """
        if self._close_refusal:
            raise InvalidArgumentError(self._close_refusal)


def comm_behind(group: Group) -> Comm:
    """Return the comm that has the operations of a group."""
    return group._comm  # noqa: SLF001 - the reason for this function
