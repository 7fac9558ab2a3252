"""What the groups of one session share, and how the members of a new one find each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rankwise.comm.connecting import Introduction
from rankwise.comm.mesh import Mesh, looking_at
from rankwise.errors import CollectiveError, RankwiseError


@dataclass(kw_only=True)
class World:
    """What the groups of one session share.

    Attributes:
        rank: This process's global rank.
        device: Where received tensors go that come from another rank's accelerator.
        timeout: Seconds that a collective waits for a rank.
        check: Single tensors on an accelerator are checked too.
        one_host: All ranks are known to be on this host, so nothing of theirs need leave it.
        store: Returns what the ranks share.
        reach: Returns the name or address that other hosts reach this one by.
        lost: Returns why it is in vain to wait for some ranks, or ""; does not wait.
        made: How many groups were made; all ranks make all groups, in one order.
        meshes: The connections in all groups that this rank is a member of.
    """

    rank: int
    device: torch.device
    timeout: float
    check: bool
    one_host: bool
    store: Callable[[], dist.Store]
    reach: Callable[[], str]
    lost: Callable[[Sequence[int]], str] = lambda _: ""
    made: int = 0
    meshes: list[Mesh] = field(default_factory=list)

    def introduce(self, name: str, ranks: Sequence[int]) -> Mesh:
        """Connect to the other members of a group.

        Collective over the members.
        """

        def check(awaited: Callable[[], Sequence[int]]) -> None:
            gone = self._gone(ranks) and self._gone(awaited())  # which costs more to ask
            if gone:
                raise CollectiveError(f"a group of {len(ranks)} ranks could not be made: {gone}")

        try:
            mesh = Introduction(
                store=self.store(),
                name=name,
                ranks=ranks,
                place=ranks.index(self.rank),
                one_host=self.one_host,
                reach=self.reach,
                timeout=self.timeout,
                check=check,
            ).connect()
        except RuntimeError as error:
            if isinstance(error, RankwiseError):
                raise
            raise CollectiveError(
                f"a group of {len(ranks)} ranks could not be made: the store where they meet failed: {error}"
            ) from error
        self.meshes.append(mesh)
        return mesh

    def _gone(self, ranks: Sequence[int]) -> str:
        """Return which of these ranks are gone and why, as far as the groups tell that no other thread is in."""
        found = []
        for mesh in list(self.meshes):
            with looking_at(mesh) as free:
                if free is not None:
                    found.append(free.gone(ranks))
        if not self.meshes:  # the first group of all is being made
            found.append(self.lost(ranks))
        return "; ".join(filter(None, found))
