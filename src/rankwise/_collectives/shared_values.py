"""Large values through files in memory, which the members of a group map.

There are three agreements: on the call, with the lengths of the values; when each member has written those that it
sends, with references to the files; and when all have mapped what they receive, after which the files are closed. A
value that members on several hosts receive is sent to the first member of each host, into a file that the others map.
What cannot be delivered like this, and what is too small for a file, is moved by the data planes.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeVar

import torch

from rankwise._collectives.serialization import Header, Serialized, deserialize
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call
from rankwise._comm.shared_memory import FileReference, ReceivedFile, map_file
from rankwise._memory import require_available

_Message = TypeVar("_Message", Header, Serialized)
# Errors after which there is no use in trying another way, which takes more memory.
_NO_MEMORY: Final = frozenset({errno.ENOMEM, errno.ENOSPC})


class MemberHosts:
    """The hosts of a group, as a member needs them.

    Attributes:
        own: The group rank of this member.
        here: The group ranks of the members on its host.
        first_elsewhere: The group rank of the first member on each other host.
    """

    def __init__(self, comm: Comm) -> None:
        hosts: Sequence[str] = comm.hosts or [""] * comm.size
        self.own = comm.control.require_member()
        self.here = [member for member, host in enumerate(hosts) if host == hosts[self.own]]
        self.first_elsewhere = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[self.own]]

    @property
    def is_alone(self) -> bool:
        """This member is the only one on its host."""
        return len(self.here) == 1

    def awaited(self, headers: Sequence[Header], senders: Sequence[int]) -> dict[int, int]:
        """Return the lengths of the values that this member receives from other hosts for its own, by their index."""
        if self.own != self.here[0]:
            return {}
        lengths = {index: header.file_bytes for index, header in enumerate(headers) if senders[index] not in self.here}
        return {index: nbytes for index, nbytes in lengths.items() if nbytes}


class Rest(Enum):
    """What remains to be moved by the data planes."""

    NOTHING = "0"
    OTHER_BUFFERS = "1"
    EVERYTHING = "2"

    def of(self, message: _Message) -> _Message:
        """Return what remains of a header, or of a value."""
        return message if self is Rest.EVERYTHING else message.without_file()

    @classmethod
    def before(cls, headers: Sequence[Header]) -> Rest:
        """Return what remains before any is delivered."""
        return cls.EVERYTHING if any(header.sizes for header in headers) else cls.NOTHING

    @classmethod
    def after(cls, headers: Sequence[Header]) -> Rest:
        """Return what remains of values whose files are delivered."""
        return cls.OTHER_BUFFERS if any(header.without_file().sizes for header in headers) else cls.NOTHING

    @classmethod
    def of_all(cls, answers: Iterable[str]) -> Rest:
        """Return what remains of the call, given what remains for each member."""
        return cls(max(answers))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What this member has done before the second agreement.

    Attributes:
        rest: What remains to be moved by the data planes.
        written: For each value that it sends a reference to its file, None without one.
        received: Memory for values from other hosts, by index, in files if other members of this host map them.
    """

    rest: Rest
    written: Sequence[FileReference | None] = ()
    received: Mapping[int, ReceivedFile | torch.Tensor] = field(default_factory=dict)

    def encode(self) -> bytes:
        files = {index: data.reference for index, data in self.received.items() if isinstance(data, ReceivedFile)}
        return json.dumps({"rest": self.rest.value, "written": self.written, "received": files}).encode()


class SharedFiles(ExitStack):
    """The files of this member in one collective, in a block at whose end they are closed."""

    def __init__(self, comm: Comm, *, to_all: bool) -> None:
        """Begin without files.

        Args:
            comm: The group.
            to_all: All members receive all values, of which each sends one at most: so can those on several hosts.
        """
        super().__init__()
        self._comm = comm
        self._to_all = to_all
        self._unpickled: list[Any] | None = None

    def deliver(
        self,
        call: Call,
        sent: Sequence[Serialized],
        headers: Sequence[Header],
        senders: Sequence[int],
        buffers: Sequence[dict[str, torch.Tensor]],
    ) -> Rest:
        """Deliver values in files, and return what remains to be moved.

        Collective over the members, which have agreed on the call. All get the same result.

        Args:
            call: The call.
            sent: What this member sends: nothing, one value, or one for each member.
            headers: The headers of the values that this member receives.
            senders: The group rank of the sender of each.
            buffers: The buffers of each, to which those that are mapped are added.

        Raises:
            MemoryError: There is no memory for them.
            PayloadTypeError: A value cannot be unpickled here.
        """
        if not self._can_share():
            return Rest.EVERYTHING
        hosts = MemberHosts(self._comm)
        call.begin_data()
        prepared = self._prepare(hosts, sent, headers, senders)
        answers = [json.loads(answer) for answer in call.all_gather(prepared.encode())]
        rest = Rest.of_all(answer["rest"] for answer in answers)
        if rest is Rest.EVERYTHING:
            return rest
        call.begin_data()
        mapped: list[torch.Tensor | None] = [None for _ in headers]
        failure: tuple[OSError, int] | None = None
        for index, (header, sender) in enumerate(zip(headers, senders, strict=True)):
            try:
                mapped[index] = _mapped(hosts, prepared, answers, index, sender) if header.file_bytes else None
            except OSError as error:
                failure = error, header.file_bytes
        self._relay(hosts, sent, prepared, senders, mapped)  # also after an error: the other hosts wait for it
        if failure is not None:
            _require_memory(*failure)
            rest = Rest.EVERYTHING
        if hosts.is_alone and hosts.own in senders and headers[senders.index(hosts.own)].file_bytes:
            mapped[senders.index(hosts.own)] = sent[0].buffers["cpu"].clone()
        if rest is Rest.NOTHING:
            self._unpickle(headers, mapped)
        rest = Rest.of_all(answer.decode() for answer in call.all_gather(rest.value.encode()))
        if rest is Rest.EVERYTHING:
            self._unpickled = None
        else:
            _add_mapped(buffers, mapped)
        return rest

    def values(self, headers: Sequence[Header], buffers: Sequence[dict[str, torch.Tensor]]) -> list[Any]:
        """Return the values, unpickled now unless they are already. Local.

        Raises:
            PayloadTypeError: A value cannot be unpickled here.
        """
        if self._unpickled is None:
            return [deserialize(header, received) for header, received in zip(headers, buffers, strict=True)]
        return self._unpickled

    def _can_share(self) -> bool:
        """Return whether members can map each other's files, as far as is known: the same on all of them."""
        hosts = self._comm.hosts
        if hosts:
            return self._to_all and len({*hosts}) < len(hosts)
        return self._comm.planes.shared_memory is not None

    def _prepare(
        self, hosts: MemberHosts, sent: Sequence[Serialized], headers: Sequence[Header], senders: Sequence[int]
    ) -> _Prepared:
        """Write what this member sends, and allocate what it receives from other hosts.

        Raises:
            MemoryError: There is no memory for it.
        """
        if not (hosts.is_alone or self._comm.uses_shared_memory):
            return _Prepared(Rest.EVERYTHING)
        awaited = hosts.awaited(headers, senders)
        require_available(sum(awaited.values()))
        nbytes = 0
        try:
            written: list[FileReference | None] = []
            for payload in sent:
                nbytes = payload.header.file_bytes
                written.append(None if hosts.is_alone or not nbytes else self._write(payload))
            received: dict[int, ReceivedFile | torch.Tensor] = {}
            for index, nbytes in awaited.items():
                received[index] = self._allocated(nbytes, is_file=not hosts.is_alone)
        except OSError as error:
            _require_memory(error, nbytes)
            return _Prepared(Rest.EVERYTHING)
        return _Prepared(Rest.after(headers), written, received)

    def _write(self, payload: Serialized) -> FileReference:
        file = payload.write_file()
        self.callback(file.close)
        return file.reference

    def _allocated(self, nbytes: int, *, is_file: bool) -> ReceivedFile | torch.Tensor:
        if not is_file:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        file = ReceivedFile(nbytes)
        self.callback(file.close)
        return file

    def _relay(
        self,
        hosts: MemberHosts,
        sent: Sequence[Serialized],
        prepared: _Prepared,
        senders: Sequence[int],
        mapped: Sequence[torch.Tensor | None],
    ) -> None:
        """Send the value of this member to each other host, and receive those of members there."""
        outgoing = []
        if hosts.first_elsewhere and sent and sent[0].header.file_bytes:
            own = mapped[senders.index(hosts.own)]
            data = sent[0].buffers["cpu"] if own is None else own  # the buffer takes memory of its own
            outgoing = [(data, first) for first in hosts.first_elsewhere]
        incoming = [(_memory(data), senders[index]) for index, data in prepared.received.items()]
        self._comm.planes.transfer(outgoing, incoming)()

    def _unpickle(self, headers: Sequence[Header], mapped: Sequence[torch.Tensor | None]) -> None:
        """Unpickle the values before the last agreement, so that an error is one on all members."""
        buffers: list[dict[str, torch.Tensor]] = [{} for _ in headers]
        _add_mapped(buffers, mapped)
        self._unpickled = self.values(headers, buffers)


def _mapped(
    hosts: MemberHosts, prepared: _Prepared, answers: Sequence[Any], index: int, sender: int
) -> torch.Tensor | None:
    """Map a value, given by its index and the group rank of its sender; None if this member has none.

    Raises:
        OSError: Its file cannot be opened, or there is no address space.
    """
    if isinstance(memory := prepared.received.get(index), torch.Tensor):
        return memory
    if sender not in hosts.here:  # the first member maps its own file too: the others see what it writes to its memory
        return map_file(FileReference(*answers[hosts.here[0]]["received"][str(index)]))
    written = answers[sender]["written"]
    reference = written[hosts.own if len(written) > 1 else 0]
    return None if reference is None else map_file(FileReference(*reference))


def _memory(data: ReceivedFile | torch.Tensor) -> torch.Tensor:
    return data.memory if isinstance(data, ReceivedFile) else data


def _add_mapped(buffers: Sequence[dict[str, torch.Tensor]], mapped: Sequence[torch.Tensor | None]) -> None:
    """Add what is mapped to the buffers of each value."""
    for received, data in zip(buffers, mapped, strict=True):
        received.update({} if data is None else {"cpu": data})


def _require_memory(error: OSError, nbytes: int) -> None:
    """Raise if an error says that there is no memory."""
    if error.errno in _NO_MEMORY:
        raise MemoryError(f"there is no memory for {nbytes} bytes of a value: {error}") from error
