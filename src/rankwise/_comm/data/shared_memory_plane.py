"""The data plane through memory that the ranks of a host have mapped: between CPUs of one host it is the fastest.

Tensors pass through the rows of a `Staging`, in chunks that stay in the caches. What is written to a row before the
members agree on a call is read after it, so a tensor of one chunk needs no other meeting before it is reduced. What is
for one member alone passes through the pipe to it. See
docs/decisions/0035-reductions-in-shared-memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from rankwise._comm.control.call import Move
from rankwise._comm.control.control import Control
from rankwise._comm.data.flat_range import FlatRange
from rankwise._comm.data.plane import REAL_DTYPES, DataPlane, Pieces, Support
from rankwise._comm.data.staged_steps import Gathered, ReducedByAll, ReducedBySlice, Reduction, Scattered, Spread, Steps
from rankwise._comm.data.staging import Staging
from rankwise._comm.reduce_ops import Op
from rankwise.errors import CollectiveError

# Of the tensors of all members together: up to this size each member reduces all of them itself, which takes less time
# than to wait for the others once more.
_REDUCED_BY_ALL_BYTES: Final = 1 << 21
_DTYPES: Final = REAL_DTYPES | {torch.complex64, torch.complex128}
_NOTHING: Final = Support(operations=frozenset())


class SharedMemoryPlane(DataPlane):
    """Moves and reduces tensors on the CPU among ranks of one host."""

    def __init__(self, control: Control, group_rank: int, *, is_only_plane: bool) -> None:
        """Use the page of the host, if all members do.

        Args:
            control: The control plane of the group.
            group_rank: The group rank of this process.
            is_only_plane: The group has no plane for tensors of other devices, which are then staged.
        """
        self._supported = Support(devices=None if is_only_plane else frozenset({"cpu"}), dtypes=_DTYPES)
        self._control = control
        self._group_rank = group_rank
        self._size = control.size
        self._staging: Staging | None = None
        # The last exchange of the group when an operation was prepared: only the first operation of a call may write to
        # its rows before the members agree.
        self._prepared_after = -1

    @property
    def support(self) -> Support:
        return self._supported if self.is_available else _NOTHING

    @property
    def is_available(self) -> bool:
        """All members use the page of the host for tensors. False before they are connected."""
        return self._control.shared_page is not None

    def close(self) -> None:
        self._staging = None

    def reduce_in_place(
        self, tensors: Sequence[torch.Tensor], op: Op, *, divisor: int = 1, is_wide: bool = False
    ) -> Move:
        """Prepare to reduce contiguous tensors of one dtype in place, as one tensor.

        Args:
            tensors: The tensors.
            op: The reduction.
            divisor: What floats and complex numbers are divided by.
            is_wide: They are half-precision floats, which are summed and divided in float32.
        """
        flat = FlatRange(tensors)
        if not flat.numel:
            return _do_nothing
        is_small = self._size * flat.nbytes <= _REDUCED_BY_ALL_BYTES
        kind = ReducedByAll if is_small else ReducedBySlice
        return self._prepare(kind(self._opened(), flat, Reduction(op, divisor=divisor, is_wide=is_wide)))

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Move:
        return self.reduce_in_place([tensor], op)

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: Op) -> Move:
        return self._prepare(Scattered(self._opened(), pieces, out, op)) if out.numel() else _do_nothing

    def _all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Move:
        """Prepare to gather tensors, also of different lengths."""
        if not any(part.numel() for part in gathered):
            return _do_nothing
        return self._prepare(Gathered(self._opened(), data, gathered))

    def _opened(self) -> Staging:
        """Return the memory through which tensors pass.

        Raises:
            CollectiveError: There is no address space, or the group was closed.
        """
        if self._staging is None:
            channel = self._control.shared_page
            if channel is None:
                raise CollectiveError("this group was closed, in another thread")
            self._staging = Staging(channel, group_rank=self._group_rank, size=self._size)
        return self._staging

    # The data of the first step is written *before* the members agree on the call. The agreement is a point that all of
    # them pass, and it costs a sleep and a wake-up; a second such point only for the data would double the cost of a
    # small tensor. So what a member has written before it sends its frame, every other member may read after the
    # verdict.
    #
    # That holds for the first operation of a call alone. The rows of a step are free when all members have come to the
    # agreement before; a second operation of the same call would write over what others still read. `_prepared_after`
    # has the exchange before which the last operation was prepared: an operation that finds the same number there is
    # not the first one, writes when it runs, and meets the others once more in place of the agreement. The same happens
    # if other steps have run between the preparation and the run, as those of an operation that was prepared with it.
    #
    # A call that fails between the two leaves a written step behind that nobody reads. The numbers of the steps tell:
    # `Staging.begin` compares those of all members, and raises if one has written another step.
    def _prepare(self, steps: Steps) -> Move:
        """Prepare an operation; if it is the first one of its call, write what the members read in its first step."""
        staging, control = steps.staging, self._control
        is_first, self._prepared_after = self._prepared_after != control.sequence, control.sequence
        step = staging.step
        staging.reserve(steps.nbytes if steps.writes else 0)
        if is_first:
            steps.write_first()

        def run() -> None:
            if is_first and staging.step == step and not steps.has_meetings:
                steps.run(_do_nothing)
                return
            with control.meetings() as meet:
                if not is_first or staging.step != step:  # in place of the agreement
                    steps.write_first()
                    meet()
                steps.run(meet)

        return run

    def _broadcast(self, data: torch.Tensor, src: int) -> Move:
        return self._prepare(Spread(self._opened(), data, src))

    def _transfer(self, outgoing: Pieces, incoming: Pieces) -> Move:
        return self._control.transfer({dst: data for data, dst in outgoing}, {src: data for data, src in incoming})


def _do_nothing() -> None:
    """Transfer no data."""
