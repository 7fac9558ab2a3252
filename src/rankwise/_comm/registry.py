"""What the groups of one session share, and how the members of a new one find each other."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rankwise._comm.control.connect import connect_mesh
from rankwise._comm.control.mesh import Mesh, looking_at
from rankwise._comm.control.protocol import Frame, FrameKind, WaitingInOtherGroup
from rankwise._comm.gloo_threads import await_rest
from rankwise.errors import CollectiveError, RankwiseError


@dataclass(kw_only=True)
class GroupRegistry:
    """What the groups of one session share.

    Attributes:
        rank: This process's global rank.
        device: Where received tensors go that come from another rank's accelerator.
        timeout: Seconds that a collective waits for a rank.
        check: Single tensors on an accelerator are checked too.
        one_host: All ranks are known to be on this host, so nothing of theirs need leave it.
        store: Returns what the ranks share.
        own_address: Returns the name or address that other hosts reach this one by.
        find_dead_ranks: Returns why it is in vain to wait for some ranks, or ""; does not wait.
        num_groups: How many groups were made; all ranks make all groups, in one order.
        meshes: The connections in all groups that this rank is a member of.
        process_groups: The process groups that were made for groups of ranks, by the groups' names.
        unreferenced: The names of those groups that nothing refers to any more, and that were not closed.
    """

    rank: int
    device: torch.device
    timeout: float
    check: bool
    one_host: bool
    store: Callable[[], dist.Store]
    own_address: Callable[[], str]
    find_dead_ranks: Callable[[Sequence[int]], str] = lambda _: ""
    num_groups: int = 0
    meshes: list[Mesh] = field(default_factory=list)
    process_groups: dict[str, weakref.ref[dist.ProcessGroup]] = field(default_factory=dict)
    unreferenced: list[str] = field(default_factory=list)

    def connect(self, name: str, ranks: Sequence[int]) -> Mesh:
        """Connect to the other members of a group.

        Collective over the members.
        """

        def check_alive(awaited: Callable[[], Sequence[int]]) -> None:
            gone = self._dead_ranks(ranks) and self._dead_ranks(awaited())  # which costs more to ask
            if gone:
                raise CollectiveError(f"a group of {len(ranks)} ranks could not be made: {gone}")

        try:
            mesh = connect_mesh(
                store=self.store(),
                name=name,
                ranks=ranks,
                group_rank=ranks.index(self.rank),
                one_host=self.one_host,
                own_address=self.own_address,
                timeout=self.timeout,
                check_alive=check_alive,
            )
        except RuntimeError as error:
            if isinstance(error, RankwiseError):
                raise
            raise CollectiveError(
                f"a group of {len(ranks)} ranks could not be made: the store where they meet failed: {error}"
            ) from error
        self.meshes.append(mesh)
        return mesh

    def _dead_ranks(self, ranks: Sequence[int]) -> str:
        """Return which of these ranks are gone and why, as far as the groups tell that no other thread is in."""
        found = []
        for mesh in list(self.meshes):
            with looking_at(mesh) as free:
                if free is not None:
                    found.append(free.dead_ranks(ranks))
        if not self.meshes:  # the first group of all is being made
            found.append(self.find_dead_ranks(ranks))
        return "; ".join(filter(None, found))

    def track_process_group(self, name: str, group: dist.ProcessGroup | None, user: object) -> None:
        """Note a process group, to be destroyed with what uses it."""
        if group is not None:
            self.process_groups[name] = weakref.ref(group)
            # Not closed where it becomes garbage: that may be anywhere, in another collective or at the end of Python.
            weakref.finalize(user, self.unreferenced.append, name).atexit = False

    def destroy_process_group(self, name: str) -> None:
        """Destroy the process group that was made for a group of ranks, if there is one."""
        group = self.process_groups.pop(name, lambda: None)()
        if group is not None:
            await_rest()
            with suppress(ValueError):  # other code has destroyed it, and has it still
                dist.destroy_process_group(group)

    def close_meshes(self, reason: str) -> None:
        """Close the connections of all groups."""
        while self.meshes:
            self.meshes.pop().close(reason)

    def close_unreferenced(self) -> None:
        """Close the groups that this rank cannot use any more, since nothing refers to them."""
        while self.unreferenced:
            name = self.unreferenced.pop()
            for mesh in [mesh for mesh in self.meshes if mesh.name == name]:
                self.meshes.remove(mesh)
                mesh.close("has no reference to the group any more")
            self.destroy_process_group(name)

    def detect_cross_group_deadlock(self, mesh: Mesh, frame: Frame, missing: Sequence[int], suspects: set[str]) -> None:
        """See whether a rank that is missing here waits for this one in another group: then neither would ever end.

        Only what is seen at two looks counts. At one, what it had to say here may still have been on its way.
        """
        for other in list(self.meshes) if frame.main else ():
            with looking_at(None if other is mesh else other) as free:
                if free is None:
                    continue
                waiting = [called for rank in missing if (called := free.waiting(rank)) is not None]
                if not any(called.main for called in waiting):
                    suspects.discard(free.name)
                elif free.name in suspects:
                    free.skip(_elsewhere(mesh, frame))
                else:
                    suspects.add(free.name)

    def notify_other_group(self, mesh: Mesh, frame: Frame, elsewhere: WaitingInOtherGroup) -> None:
        """Let those know who wait in another group that this rank was here, and not on its way to them."""
        for other in list(self.meshes):
            with looking_at(other if other.name == elsewhere.group else None) as free:
                if free is not None and free.sequence == elsewhere.sequence - 1:
                    free.skip(_elsewhere(mesh, frame))


def _elsewhere(mesh: Mesh, frame: Frame) -> Frame:
    """Return the frame for another group, of a rank that waits in this one."""
    body = pickle.dumps(WaitingInOtherGroup(mesh.name, mesh.ranks, mesh.sequence))
    return Frame(FrameKind.ELSEWHERE, 0, frame.call, body=body, main=frame.main)
