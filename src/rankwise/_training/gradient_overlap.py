"""Reductions of buckets during backward: each starts when the last of its gradients is there.

The buckets of a layout start in one order on all ranks, in a group of their own, so that collectives of the program in
between do not matter. A step ends with `sync_grads`, which starts the buckets that backward has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from rankwise._collectives.groups import open_group
from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.reduce_ops import Op
from rankwise._comm.work import Work
from rankwise._training.gradient_buckets import Bucket
from rankwise.errors import CollectiveError, RankwiseError


class GradientOverlap:
    """The state of the reductions of one step.

    Attributes:
        group: The group in which the buckets are reduced: with the members of `comm`, and no other calls.
        comm: The group of `sync_grads`.
        op: The reduction.
        order: The indices of the parameters, in the order in which this rank got their gradients in the first step.
        paused: The number of `no_sync` blocks that are entered.
        started: The number of buckets that were started in this step.
        lost: The group was left, so that no bucket can be reduced in it any more.
        has_reduced: A bucket of this step was reduced, or its reduction has begun on all ranks.
    """

    def __init__(self, comm: Comm, group: Comm, op: Op, *, is_ordered: bool) -> None:
        """Begin with the first step.

        Args:
            comm: The group of `sync_grads`.
            group: A group with the same members, for the buckets alone.
            op: The reduction.
            is_ordered: The buckets are in an order that the ranks have agreed on.
        """
        self.comm = comm
        self.group = group
        self.op = op
        self.is_ordered = is_ordered
        self.order: dict[int, None] = {}
        self.paused = 0
        self.started = 0
        self.lost = False
        self.has_reduced = False
        self._buckets: Sequence[Bucket] = ()
        self._digest = ""
        self._waiting: list[set[int]] = []
        self._bucket_of: dict[int, int] = {}
        self._works: list[Work[None]] = []

    def begin_step(self, buckets: Sequence[Bucket], digest: str) -> None:
        """Wait for the gradients of a new step."""
        self._buckets, self._digest = buckets, digest
        self._waiting = [set(bucket.plan.indices) for bucket in buckets]
        self._bucket_of = {index: place for place, bucket in enumerate(buckets) for index in bucket.plan.indices}
        self.started = 0
        self.has_reduced = False
        self._works = []

    def has_started(self, index: int) -> bool:
        """Return whether the bucket of a parameter was started in this step."""
        return self._bucket_of.get(index, self.started) < self.started

    def require_open(self, index: int, name: str, *, is_new: bool) -> None:
        """Check that backward may add to a gradient: its bucket was not started yet.

        Args:
            index: The index of the parameter.
            name: Its name.
            is_new: The gradient is new, since it was None: the last step was given up, without `sync_grads`.

        Raises:
            CollectiveError: It was started.
        """
        has_started = self.has_started(index)
        if has_started and not is_new:
            raise CollectiveError(
                f"backward() adds to the gradient of {name}, which is being reduced since an earlier backward(): with "
                "overlap=True, put all but the last backward() of a step into `with rankwise.no_sync(parameters):`"
            )
        if is_new and (has_started or self._is_complete(index)):
            # Its bucket must not be reduced with the buckets that other ranks have started in the step before.
            self.discard("has given up a step, without sync_grads")

    def _is_complete(self, index: int) -> bool:
        """Return whether a gradient of this step is in its bucket."""
        place = self._bucket_of.get(index)
        return not self.lost and place is not None and index not in self._waiting[place]

    def accumulated(self, index: int) -> None:
        """Take note that a gradient is in its bucket, and start the buckets that are complete, in their order."""
        if self.paused or self.lost:
            return
        if not self.is_ordered:
            self.order.pop(index, None)
            self.order[index] = None
        if (place := self._bucket_of.get(index)) is not None:
            self._waiting[place].discard(index)
        while self.started < len(self._buckets) and not self._waiting[self.started]:
            self._buckets[self.started].count(())
            self._start_next()

    def finish(self, missing: Sequence[int]) -> None:
        """Start the buckets that are left, and wait for all.

        Args:
            missing: The indices of the parameters without a gradient, in buckets that are left.
        """
        for bucket in self._buckets[self.started :]:
            bucket.count(missing)
            self._start_next()
        errors = []
        for work in self._works:
            try:
                work.wait()
            except RankwiseError as error:
                errors.append(error)
        self.begin_step(self._buckets, self._digest)
        if errors:
            raise errors[0]

    def discard(self, reason: str) -> None:
        """Leave the group, and with it the reductions that are not done."""
        self.lost, self.started = True, 0
        if not self.group.closed:
            self.group.close_locally(reason)
        for work in self._works:
            with suppress(RankwiseError):
                work.wait()

    def _start_next(self) -> None:
        bucket, place = self._buckets[self.started], self.started
        self.started += 1

        def run() -> None:
            call = Call("sync_grads", {"bucket": place}, self._digest)
            with self.group.collective(call):
                reduce = bucket.prepare(self.group, self.op)
                self.group.verify(call)
                self.has_reduced = True
                reduce()

        self._works.append(self.group.start(Call("sync_grads"), run))


def open_bucket_group(comm: Comm) -> Comm:
    """Return a new group with the members of another one. Collective over the members."""
    call = Call("sync_grads", {"step": "a group for buckets"}, is_data=True)
    with comm.collective(call):
        return open_group(comm, call, list(comm.ranks))
