"""Values that all members of a group on several hosts receive: each is sent to each host once.

The first member of each host receives the values of other hosts, into files in memory that the other members of its
host map, as they map each other's. There are three agreements: on the call; when all members have the memory for what
they receive, with references to those files; and when all data have arrived, after which the files are closed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rankwise._collectives.safe_values import is_safe
from rankwise._collectives.serialization import Header, Serialized
from rankwise._collectives.shared_values import (
    Rest,
    SharedFiles,
    add_mapped,
    mapped_file,
    missing,
    require_memory,
)
from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.control.shared_file import FileReference, ReceivedFile, map_file
from rankwise._memory import require_available


def files_for_all(comm: Comm) -> SharedFiles:
    """Return the files of a collective whose values all members receive; all members get those of one class."""
    hosts = comm.hosts
    return RelayedFiles(comm, hosts) if 1 < len({*hosts}) < len(hosts) else SharedFiles(comm)


class RelayedFiles(SharedFiles):
    """The files of this member, its own and those of values from other hosts."""

    def __init__(self, comm: Comm, hosts: Sequence[str]) -> None:
        """Begin without files.

        Args:
            comm: The group.
            hosts: The host of each member, by group rank; some members share one.
        """
        super().__init__(comm)
        self._hosts = hosts
        self._own = comm.require_member()
        self._here = [member for member, host in enumerate(hosts) if host == hosts[self._own]]
        self._is_first = self._own == self._here[0]
        self._first_elsewhere = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[self._own]]
        self._sent: Serialized | None = None

    def offer(self, payload: Serialized) -> Serialized:
        self._sent = super().offer(payload)
        return self._sent

    def deliver(
        self,
        call: Call,
        headers: Sequence[Header],
        buffers: Sequence[dict[str, torch.Tensor]],
        senders: Sequence[int] = (),
    ) -> Rest:
        call.begin_data()
        is_here = [sender in self._here for sender in senders]
        mapped = [self._from_here(header) if here else None for header, here in zip(headers, is_here, strict=True)]
        is_delivered = not missing(
            [header for header, here in zip(headers, is_here, strict=True) if here],
            [data for data, here in zip(mapped, is_here, strict=True) if here],
        )
        awaited = {
            index: header.sizes["cpu"]
            for index, header in enumerate(headers)
            if not is_here[index] and header.needs_file
        }
        memories, files = self._allocated(awaited) if self._is_first and is_delivered else ({}, {})
        is_delivered = is_delivered and (not self._is_first or memories.keys() == awaited.keys())
        answers = self._agree(call, Rest.after(headers, is_delivered=is_delivered), files)
        rest = Rest.of_all(answer["rest"].encode() for answer in answers)
        if rest is Rest.EVERYTHING:
            return rest

        for index, data in memories.items():
            mapped[index] = data
        failure = self._map_received(answers[self._here[0]]["files"], mapped)
        outgoing = [(data, first) for data in self._sent_data(senders, mapped) for first in self._first_elsewhere]
        self._comm.transfer(outgoing, [(data, senders[index]) for index, data in memories.items()])()
        call.begin_data()
        if failure is not None:
            raise failure
        if rest is Rest.NOTHING and not is_safe(call):
            self._unpickle(headers, mapped)
        self._comm.verify(call)
        add_mapped(buffers, mapped)
        return rest

    def _can_share(self) -> bool:
        return len(self._here) > 1 and self._comm.uses_shared_memory

    def _from_here(self, header: Header) -> torch.Tensor | None:
        """Return the CPU buffer of a value of this host; None if it needs no file, or that cannot be mapped."""
        if len(self._here) > 1 or not header.needs_file or self._sent is None:
            return mapped_file(header)
        return self._sent.buffers["cpu"].clone()

    def _allocated(self, awaited: Mapping[int, int]) -> tuple[dict[int, torch.Tensor], dict[int, ReceivedFile]]:
        """Return memory for values of other hosts, by index, and the files in which it is; less if there are none."""
        require_available(sum(awaited.values()))
        if len(self._here) == 1:
            return {
                index: torch.empty(nbytes, dtype=torch.uint8, device="cpu") for index, nbytes in awaited.items()
            }, {}
        files: dict[int, ReceivedFile] = {}
        for index, nbytes in awaited.items() if self._can_share() else ():
            try:
                files[index] = ReceivedFile(nbytes)
            except OSError as error:
                require_memory(error, nbytes)
                break
            self.callback(files[index].close)
        return {index: file.memory for index, file in files.items()}, files

    def _agree(self, call: Call, rest: Rest, files: Mapping[int, ReceivedFile]) -> list[dict[str, Any]]:
        """Exchange what remains for each member, and references to its files, by the index of the value."""
        references = {index: file.reference for index, file in files.items()}
        message = json.dumps({"rest": rest.value.decode(), "files": references}).encode()
        return [json.loads(answer) for answer in self._comm.all_gather_bytes(call, message)]

    def _map_received(
        self, references: Mapping[str, Sequence[int]], mapped: list[torch.Tensor | None]
    ) -> OSError | None:
        """Map the files in which values of other hosts arrive. An error is returned: first the data have to move.

        So does the first member of a host: nobody else sees what it writes to its result.
        """
        try:
            for index, reference in references.items():
                mapped[int(index)] = map_file(FileReference(*reference))
        except OSError as error:
            return error
        return None

    def _sent_data(self, senders: Sequence[int], mapped: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the CPU buffer of the value that this member sends, if there is one."""
        return [data for sender, data in zip(senders, mapped, strict=True) if sender == self._own and data is not None]
