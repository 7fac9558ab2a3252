"""The registry of a session's groups: how they connect, are closed, and find deadlocks between each other."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rankwise._comm.control.connect import connect_mesh
from rankwise._comm.control.mesh import Mesh, try_lock
from rankwise._comm.control.protocol import Frame, FrameKind, WaitingInOtherGroup
from rankwise._comm.gloo_threads import await_idle_threads
from rankwise.errors import CollectiveError, RankwiseError


@dataclass(kw_only=True)
class GroupRegistry:
    """The groups of one session, and their common settings.

    Attributes:
        rank: The global rank of this process.
        device: The device of received tensors that were on another rank's accelerator.
        timeout: Seconds that a collective waits for a rank.
        check: Single tensors on an accelerator are verified too.
        one_host: All ranks are known to be on this host, so their data need not leave it.
        store: Returns the store that all ranks share.
        own_address: Returns the name or address of this host for other hosts.
        find_dead_ranks: Returns the dead ranks among the given ones, with reasons, or ""; does not wait. For the time
            before the first group, which has connections of its own.
        num_groups: The number of groups made so far; all ranks make all groups, in the same order.
        meshes: The connections of all groups that this rank is a member of.
        process_groups: The process groups that were created for groups, by the name of the group.
        unreferenced: The names of groups without references that were not closed.
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
            dead = self._dead_ranks(ranks) and self._dead_ranks(awaited())  # `awaited` asks the store: only if needed
            if dead:
                raise CollectiveError(f"a group of {len(ranks)} ranks could not be made: {dead}")

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
                f"a group of {len(ranks)} ranks could not be made: the store of the ranks failed: {error}"
            ) from error
        self.meshes.append(mesh)
        return mesh

    def _dead_ranks(self, ranks: Sequence[int]) -> str:
        """Return the dead ranks among these, with reasons, found in groups that no other thread is using."""
        found = []
        for mesh in list(self.meshes):
            with try_lock(mesh) as locked:
                if locked is not None:
                    found.append(locked.dead_ranks(ranks))
        if not self.meshes:  # the first group of the session is being made
            found.append(self.find_dead_ranks(ranks))
        return "; ".join(filter(None, found))

    def track_process_group(self, name: str, group: dist.ProcessGroup | None, user: object) -> None:
        """Register a process group, to be destroyed after its user is closed or has no references."""
        if group is not None:
            self.process_groups[name] = weakref.ref(group)
            # The finalizer only records the name. Garbage collection may run in another collective or at interpreter
            # exit, and destroying a process group waits for its threads.
            weakref.finalize(user, self.unreferenced.append, name).atexit = False

    def destroy_process_group(self, name: str) -> None:
        """Destroy the process group that was created for a group, if there is one."""
        group = self.process_groups.pop(name, lambda: None)()
        if group is not None:
            await_idle_threads()
            with suppress(ValueError):  # other code has destroyed it, and still refers to it
                dist.destroy_process_group(group)

    def close_meshes(self, reason: str) -> None:
        """Close the connections of all groups."""
        while self.meshes:
            self.meshes.pop().close(reason)

    def close_unreferenced(self) -> None:
        """Close the groups that this rank cannot use any more because nothing refers to them."""
        while self.unreferenced:
            name = self.unreferenced.pop()
            for mesh in [mesh for mesh in self.meshes if mesh.name == name]:
                self.meshes.remove(mesh)
                mesh.close("has no reference to the group any more")
            self.destroy_process_group(name)

    def detect_cross_group_deadlock(self, mesh: Mesh, frame: Frame, missing: Sequence[int], suspects: set[str]) -> None:
        """Look for a deadlock: a rank that is missing in this group waits for this rank in another group.

        Called again and again while this rank waits here. If there is a deadlock, this rank posts a frame to the other
        group, so that its members raise; they in turn notify this group (`notify_other_group`).

        Args:
            mesh: The connections of the group in which this rank waits.
            frame: The frame of this rank there.
            missing: The ranks that have sent none.
            suspects: The groups in which such a rank was found at the last look; updated here.
        """
        # One look proves nothing: the rank may have finished here, with its frame still on the way, and gone on to the
        # other group. At the second look the frame would have arrived. And only calls of main threads count: with a
        # group for each thread, a rank may wait in several groups without a deadlock.
        for other in list(self.meshes) if frame.main else ():
            with try_lock(None if other is mesh else other) as locked:
                if locked is None:
                    continue
                pending = [call for rank in missing if (call := locked.pending_call(rank)) is not None]
                if not any(call.main for call in pending):
                    suspects.discard(locked.name)
                elif locked.name in suspects:
                    locked.post_frame(_waiting_frame(mesh, frame))
                else:
                    suspects.add(locked.name)

    def notify_other_group(self, mesh: Mesh, frame: Frame, waiting: WaitingInOtherGroup) -> None:
        """Post a frame to another group that waits for this rank, which was found in a deadlock in this group.

        Members of both groups must take part in the same number of exchanges, or the groups could not be used again.
        """
        for other in list(self.meshes):
            with try_lock(other if other.name == waiting.group else None) as locked:
                # Only if this rank has not entered that exchange, or posted to it, before.
                if locked is not None and locked.sequence == waiting.sequence - 1:
                    locked.post_frame(_waiting_frame(mesh, frame))


def _waiting_frame(mesh: Mesh, frame: Frame) -> Frame:
    """Return the frame for another group, from a rank that waits in this one."""
    body = pickle.dumps(WaitingInOtherGroup(mesh.name, mesh.ranks, mesh.sequence))
    return Frame(FrameKind.WAITING_IN_OTHER_GROUP, 0, frame.call, body=body, main=frame.main)
