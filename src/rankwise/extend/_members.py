"""The members of a group in a collective of another package, and the exchanges between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch

from rankwise._arguments import as_seconds
from rankwise._collectives.all_gather import all_gather
from rankwise._collectives.exchange_tensors import exchange_tensors
from rankwise._collectives.groups import GroupLike
from rankwise._collectives.reduce import all_reduce, all_reduce_
from rankwise._collectives.rooted import broadcast, gather
from rankwise._collectives.scatter import scatter
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call
from rankwise._comm.group_rank import GroupRank
from rankwise._user_frames import strip_internal_frames
from rankwise.errors import CollectiveError, InvalidArgumentError, PayloadTypeError, shown

T = TypeVar("T")

# The longest message of the methods that exchange bytes. Larger data are values.
MAX_MESSAGE_BYTES: Final = 4096


class Members:
    """The members of a group in a collective, and the exchanges between them; made by `collective`.

    An exchange begins with an agreement of all members that they make the same one. Ranks in arguments are global, as
    in rankwise's own collectives; results are in the order of `ranks`. Outside of the block, an exchange is an error.

    Attributes:
        rank: The group rank of this process, an index of `ranks`.
        ranks: The global ranks of the members.
        size: The number of members.
    """

    def __init__(
        self,
        comm: Comm,
        group: GroupLike | None,
        name: str,
        settings: Mapping[str, object] | None,
        values: Mapping[str, str] | None,
        site: str,
    ) -> None:
        self._comm = comm
        self._group = group
        self._name = name
        self._site = site
        self._settings = checked_mapping(settings, "settings")
        self._values = checked_mapping(values, "values")
        self._step = 0
        self._call: Call | None = None
        self._block: Call | None = None

    def __enter__(self) -> Self:
        if self._step:
            raise CollectiveError(f"{self._name}: a collective is run once; call collective() for each")
        self._begin_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        block, self._block, self._call = self._block, None, None
        if error is not None:
            strip_internal_frames(traceback, error)
        if block is not None:
            block.__exit__(kind, error, traceback)

    @property
    def rank(self) -> int:
        """The group rank of this process."""
        return self._comm.control.require_member()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the members."""
        return tuple(self._comm.ranks)

    @property
    def size(self) -> int:
        """The number of members."""
        return self._comm.size

    @property
    def settings(self) -> Mapping[str, object]:
        """The arguments that have to be the same on all members; may be assigned before the first exchange."""
        return self._settings

    @settings.setter
    def settings(self, settings: Mapping[str, object]) -> None:
        self._first_call().settings = self._settings = checked_mapping(settings, "settings")

    @property
    def values(self) -> Mapping[str, str]:
        """Descriptions of the values that have to match; may be assigned before the first exchange."""
        return self._values

    @values.setter
    def values(self, values: Mapping[str, str]) -> None:
        call = self._first_call()
        self._values = checked_mapping(values, "values")
        call.content, call.parts = str(self._values), lambda: self._values

    def verify(self, *, timeout: float | None = None) -> None:
        """Wait until every member has made this call.

        Args:
            timeout: Seconds to wait for the other members; the session's timeout by default.

        Raises:
            MismatchError: Another member calls another collective, or its settings or values differ.
            RemoteRankError: Another member has raised.
            CollectiveTimeoutError: A member did not come in time.
            CollectiveError: A member is dead.
        """
        seconds = None if timeout is None else as_seconds(timeout, "timeout")
        self._exchange(lambda call: call.verify(timeout=seconds))

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the short message of every member; the lengths may differ. Raises as `verify`."""
        checked = _checked_message(message)
        return self._exchange(lambda call: call.all_gather(checked))

    def gather_bytes(self, message: bytes, *, dst: int | GroupRank = 0) -> list[bytes] | None:
        """Return the short message of every member on the rank `dst`, and None on the others. Raises as `verify`."""
        checked, receiver = _checked_message(message), self._comm.group_rank_of(dst, "dst")
        messages, _ = self._exchange(lambda call: call.gather(checked, receiver))
        return messages if self.rank == receiver else None

    def broadcast_bytes(self, message: bytes, *, src: int | GroupRank = 0) -> bytes:
        """Return the short message of the rank `src`; that of the others is ignored. Raises as `verify`."""
        sender = self._comm.group_rank_of(src, "src")
        checked = _checked_message(message) if self.rank == sender else b""
        return self._exchange(lambda call: call.broadcast(checked, sender))

    def scatter_bytes(self, messages: Sequence[bytes], *, src: int | GroupRank = 0) -> bytes:
        """Return the short message of the rank `src` to this member; on the others, `messages` is ignored.

        Raises as `verify`, and InvalidArgumentError if there is not one message for each member.
        """
        sender = self._comm.group_rank_of(src, "src")
        checked: list[bytes] = []
        if self.rank == sender:
            checked = [_checked_message(message) for message in messages]
            if len(checked) != self.size:
                raise InvalidArgumentError(
                    f"scatter_bytes takes one message for each of {self.size}, got {len(checked)}"
                )
        return self._exchange(lambda call: call.scatter(checked, sender))

    def all_reduce(self, value: Any, op: str = "sum") -> Any:  # noqa: ANN401 - as rankwise.all_reduce
        """Return the reduction of the values of all members, as `rankwise.all_reduce` does."""
        return self._nested(lambda: all_reduce(value, op, group=self._group))

    def all_reduce_(self, tensor: T, op: str = "sum") -> T:
        """Reduce tensors in place, and return them, as `rankwise.all_reduce_` does."""
        return self._nested(lambda: all_reduce_(tensor, op, group=self._group))

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all members, as `rankwise.all_gather` does."""
        return self._nested(lambda: all_gather(value, group=self._group))

    def gather(self, value: T, *, dst: int | GroupRank = 0) -> list[T] | None:
        """Return the values of all members on the rank `dst`, as `rankwise.gather` does."""
        return self._nested(lambda: gather(value, dst=dst, group=self._group))

    def broadcast(self, value: T, *, src: int | GroupRank = 0) -> T:
        """Return the value of the rank `src`, as `rankwise.broadcast` does."""
        return self._nested(lambda: broadcast(value, src=src, group=self._group))

    def scatter(self, values: Sequence[T] | None, *, src: int | GroupRank = 0) -> T:
        """Return the value of the rank `src` for this member, as `rankwise.scatter` does."""
        return self._nested(lambda: scatter(values, src=src, group=self._group))

    def exchange(self, outgoing: Mapping[int | GroupRank, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Send tensors to members, of any shapes and types, and return the tensors that members sent to this one.

        Args:
            outgoing: Tensors by the global rank that each is sent to, this one included; no other member needs to know
                their number or shapes.

        Returns:
            New tensors by the global rank that each comes from, in the order of ranks.

        Raises:
            InvalidArgumentError: A key of `outgoing` is not a member.
            PayloadTypeError: A value of it is not a dense tensor.
            MismatchError, RemoteRankError, CollectiveError: As by `verify`.

        Example:
            >>> from rankwise.extend.collectives import collective
            >>> with collective("dispatch") as members:  # on each rank: a row for the rank after it
            ...     after = members.ranks[(members.rank + 1) % members.size]
            ...     members.exchange({after: torch.ones(2)})
            {0: tensor([1., 1.])}
        """
        return self._nested(lambda: exchange_tensors(self._comm, self._new_call("exchange"), outgoing))

    def _exchange(self, run: Callable[[Call], T]) -> T:
        """Run an exchange of this call; what follows in the block belongs to the next one."""
        call = self._current_call()
        self._call = None  # no exchange is possible after one that failed
        result = run(call)
        self._end_step()
        self._begin_step()
        return result

    def _nested(self, run: Callable[[], T]) -> T:
        """Run a collective in the same group."""
        self._current_call()
        self._end_step()
        result = run()
        self._begin_step()
        return result

    def _begin_step(self) -> None:
        """Begin a part of the block that ends with an exchange: an exception in it is reported to the other members."""
        self._step += 1
        call = self._block = self._new_call()
        try:
            call.__enter__()
        except BaseException:
            self._block = None
            raise
        self._call = call

    def _end_step(self) -> None:
        block, self._block, self._call = self._block, None, None
        if block is not None:
            block.__exit__(None, None, None)

    def _new_call(self, exchange: str = "") -> Call:
        settings = dict(self._settings)
        if exchange:
            settings["exchange"] = exchange
        if self._step > 1:
            settings["step"] = self._step
        content = str(self._values) if self._values else ""
        call = self._comm.call(self._name, settings, content=content, site=self._site)
        call.parts = lambda: self._values
        return call

    def _current_call(self) -> Call:
        if self._call is None:
            raise CollectiveError(
                f"{self._name}: an exchange outside of the block of its collective, or after one that failed"
            )
        return self._call

    def _first_call(self) -> Call:
        call = self._current_call()
        if self._step > 1:
            raise CollectiveError(f"{self._name}: settings and values are assigned before the first exchange")
        return call


def checked_mapping(given: Mapping[str, T] | None, name: str) -> dict[str, T]:
    """Return settings or values, by name, in the order of their names.

    Raises:
        InvalidArgumentError: They are not a mapping of names.
    """
    if given is not None and (not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given)):
        raise InvalidArgumentError(f"{name}={shown(given)} is not a mapping of names")
    return dict(sorted((given or {}).items()))


def _checked_message(message: bytes) -> bytes:
    if not isinstance(message, bytes):
        raise PayloadTypeError(f"a message is bytes, got {shown(message)}; broadcast() and the like take any value")
    if len(message) > MAX_MESSAGE_BYTES:
        raise InvalidArgumentError(
            f"a message has at most {MAX_MESSAGE_BYTES} bytes, got {len(message)}; broadcast() and the like take more"
        )
    return message
