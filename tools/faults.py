"""The seeded faults of `tools.mutants`: mistakes that a change of the code could make, with the tests that notice them.

A fault replaces a text that occurs once in a file below src/rankwise. Where code moves, its faults move with it: their
file and text change, and their tests may; what breaks stays. Texts are short, so that few changes touch them, and tests
are those of the same room that take a few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes:
        name: Its name.
        file: The file below src/rankwise.
        text: What is replaced; it occurs once.
        replacement: By what.
        breaks: What does not hold any more.
        tests: The tests that notice it, as arguments of pytest.
        limit: The seconds after which they are ended: a fault that lets them hang is noticed, too.
    """

    name: str
    file: str
    text: str
    replacement: str
    breaks: str
    tests: tuple[str, ...]
    limit: float


def _fault(name: str, file: str, text: str, replacement: str, breaks: str, *tests: str, limit: float = 30) -> Fault:
    return Fault(name, file, text, replacement, breaks, tests, limit)


CHANNELS = "tests/comm/test_channels.py"
LEADERS = "tests/comm/test_leaders.py"
EXCHANGE = "tests/comm/test_exchange.py"
PAGES = "tests/comm/test_pages.py"
PIPES = "tests/comm/test_pipes.py"
CONTRACT = "tests/contract"

# The memory of a host through which its ranks agree, and the connections of those of several hosts.
_CHANNELS = (
    _fault(
        "page-frame-without-fence",
        "_comm/control/page/window.py",
        "        self.fence()\n        (self._frames[parity]",
        "        (self._frames[parity]",
        "Another processor may see the number of a frame before its content.",
        f"{PAGES}::test_what_others_look_for_is_written_behind_a_fence",
    ),
    _fault(
        "page-meeting-without-fence",
        "_comm/control/page/meeting.py",
        "        window.fence()  # before the look at the others",
        "        # before the look at the others",
        "Of two members that come at once, neither may see the other one.",
        f"{PAGES}::test_what_others_look_for_is_written_behind_a_fence",
    ),
    _fault(
        "page-body-of-the-exchange-before",
        "_comm/control/page/window.py",
        "        start = self._starts[slot] + (sequence & 1) * FRAME_BYTES",
        "        start = self._starts[slot]",
        "A member reads the body of the exchange before.",
        f"{CHANNELS}::test_each_member_receives_every_body[page]",
    ),
    _fault(
        "page-windows-overlap",
        "_comm/control/page/memory.py",
        "(0 if area else self._directory_bytes)",
        "(0 if area else self._directory_bytes - 4096)",
        "The window of a group overlaps the directory.",
        "tests/comm/test_page_memory.py",
    ),
    _fault(
        "page-slots-of-another-length",
        "_comm/control/page/layout.py",
        "SLOT_BYTES: Final = 2 * FRAME_BYTES + REASON_BYTES",
        "SLOT_BYTES: Final = 2 * FRAME_BYTES + 2 * REASON_BYTES",
        "The windows take more memory, and ranks of another version read something else.",
        "tests/comm/test_layout.py",
    ),
    _fault(
        "frame-with-a-longer-header",
        "_comm/control/protocol.py",
        '_MEMBER: Final = struct.Struct("<I")',
        '_MEMBER: Final = struct.Struct("<Q")',
        "Frames in a bundle are longer, and ranks of another version read something else.",
        "tests/comm/test_frames.py",
    ),
    _fault(
        "page-digest-not-compared",
        "_comm/control/page/window.py",
        " or other != digest or",
        " or",
        "Different calls of members agree.",
        f"{CONTRACT}/test_routes.py::test_every_divergence",
    ),
    _fault(
        "page-dead-rank-not-noticed",
        "_comm/control/page_channel.py",
        '(CLOSED if self._indices[member] in self.page.dead else "")',
        '""',
        "A rank that was killed is waited for until the timeout.",
        "tests/session/test_dead_ranks.py::test_every_other_rank_raises",
    ),
    _fault(
        "page-left-rank-not-noticed",
        "_comm/control/page_channel.py",
        'left = "" if member == self.own else self._window.left(member)',
        'left = ""',
        "A member that has left the group is waited for.",
        f"{CHANNELS}::test_the_reason_of_a_member_that_left_is_in_the_error[page]",
    ),
    _fault(
        "page-timeout-of-one-member-alone",
        "_comm/control/page_channel.py",
        "        self._window.set_timed_out(self.own, self.sequence, str(error))",
        "",
        "A member that has timed out leaves the others in the exchange.",
        f"{PAGES}::test_timeouts_of_members_that_are_ahead_are_raised_on_the_late_one",
    ),
    _fault(
        "page-frame-overwritten-unread",
        "_comm/control/page_channel.py",
        "        self._has_room = self._last_complete == self.sequence - 1 or not self._behind(self.sequence - 2)",
        "        self._has_room = True",
        "A member that is ahead writes over a frame that others have not read.",
        f"{PAGES}::test_failures_of_a_member_that_is_ahead_are_read_in_order",
    ),
    _fault(
        "page-memory-kept",
        "_comm/control/page/host_page.py",
        "            window.free()  #",
        "            #",
        "The memory of a closed group is not freed, nor zero for the next one.",
        f"{PAGES}::test_groups_that_are_closed_leave_nothing",
        f"{PAGES}::test_many_groups_take_few_descriptors_and_leave_nothing",
    ),
    _fault(
        "pipe-bytes-counted-before-they-are-there",
        "_comm/control/page/pipes.py",
        "            self._fence()\n            self._moved += nbytes",
        "            self._moved += nbytes",
        "Another processor may see the count of the bytes of a pipe before the bytes.",
        f"{PIPES}::test_bytes_are_counted_and_copied_on_the_right_side_of_a_fence",
    ),
    _fault(
        "pipe-sender-writes-over-unread-bytes",
        "_comm/control/page/pipes.py",
        "        elif self._moved or other == self._count:",
        "        elif True:",
        "The second transfer of a call begins before the receiver has read the first.",
        f"{PIPES}::test_transfers_without_an_agreement_between_them_follow_each_other",
    ),
    _fault(
        "pipe-end-not-woken",
        "_comm/control/page/pipes.py",
        "                self._wake([member])",
        "                pass",
        "A member that sleeps until data comes, or until there is room for it, is not woken.",
        f"{PIPES}::test_members_that_sleep_are_woken_for_each_part",
    ),
    _fault(
        "page-no-look-before-the-sleep",
        "_comm/control/page_channel.py",
        "            return has_news() or self._links.loop.wait(seen, pause())",
        "            return self._links.loop.wait(seen, pause())",
        "A wake-up is lost: what came before this member was known to sleep has woken nobody.",
        f"{PIPES}::test_data_that_comes_just_before_a_member_sleeps_ends_its_wait",
    ),
    _fault(
        "pipe-not-allocated-before-the-agreement",
        "_comm/control/page/pipes.py",
        "            end.reserve(data.numel())",
        "            pass",
        "A rank for whose data there is no memory is killed by the kernel.",
        f"{CONTRACT}/test_transfers.py::test_a_rank_without_memory_is_an_error_on_all",
        f"{PIPES}::test_short_transfers_take_little_memory_which_is_allocated_before",
    ),
    _fault(
        "error-that-ends-an-exchange-lost",
        "_comm/control/exchange.py",
        "return self.errors if kind is FrameKind.ENDED else self.frames",
        "return {} if kind is FrameKind.ENDED else self.frames",
        "A member that has all frames goes on, though another one has ended the exchange with an error.",
        f"{CHANNELS}::test_a_timeout_is_raised_on_every_member",
        "tests/comm/test_random_exchanges.py",
    ),
    _fault(
        "sockets-left-rank-not-noticed",
        "_comm/control/exchange.py",
        "            self.left = self.left or frame.call",
        "            pass",
        "A member that has left the group is waited for.",
        f"{CHANNELS}::test_the_reason_of_a_member_that_left_is_in_the_error[sockets]",
    ),
    _fault(
        "leader-forwards-no-frames",
        "_comm/control/exchange.py",
        "any(frames[member].reads for member in below)",
        "False",
        "Members do not get the frames of the others that they read.",
        f"{EXCHANGE}::test_members_that_come_agree",
        f"{LEADERS}::test_frames_go_through_the_leaders",
    ),
    _fault(
        "timeout-raised-without-the-root",
        "_comm/control/exchange.py",
        "waited - self._error_since < GRACE_SECONDS",
        "waited < 0",
        "A member raises the timeout of another one although the root has found agreement.",
        f"{EXCHANGE}::test_at_a_timeout_all_have_the_same_outcome",
    ),
    _fault(
        "root-agrees-after-an-end",
        "_comm/control/exchange.py",
        """        error = self._ended(waited)
        if error is not None:
            return Verdict(Outcome.ERROR, error=error)
""",
        "",
        "The root finds agreement after a member has ended the exchange.",
        f"{EXCHANGE}::test_at_a_timeout_all_have_the_same_outcome",
    ),
    _fault(
        "lost-parent-not-noticed",
        "_comm/control/exchange.py",
        "        if member == tree.parent:",
        "        if member == -1:",
        "A member waits for a verdict that its parent, which is gone, will not send on.",
        f"{EXCHANGE}::test_the_end_of_members_is_noticed_by_all_that_wait",
    ),
    _fault(
        "no-announcement",
        "_comm/control/exchange.py",
        "if verdict is None and waited > self._announce_after:",
        "if False:",
        "A member that waits is missing for the others.",
        f"{EXCHANGE}::test_at_a_timeout_all_have_the_same_outcome",
    ),
    _fault(
        "data-written-over",
        "_comm/control/links/socket_flow.py",
        "            self._unfilled[rank] = buffer[received:]",
        "            self._unfilled[rank] = buffer",
        "Data that comes in several pieces is written over.",
        f"{CHANNELS}::test_frames_and_data_alternate",
    ),
    _fault(
        "proof-of-a-rank-not-checked",
        "_net/rank_proof.py",
        '        if not hmac.compare_digest(proof, code(self._key, "connecting", hello, self._nonces[client])):',
        "        if not proof:",
        "A process that does not know the secret of the job is taken for a rank.",
        "tests/test_job_secret.py::test_a_proof_with_another_key_is_refused",
        "tests/comm/test_connect.py::test_clients_without_the_secret_are_rejected",
    ),
    _fault(
        "connections-left-open",
        "_comm/control/links/links.py",
        "            peer.connection.close()",
        "            pass",
        "Connections between ranks outlast the session.",
        f"{CHANNELS}::test_each_member_receives_every_body[sockets]",
        "tests/comm/test_connect.py::test_no_descriptor_stays_open_after_a_timeout",
    ),
)

# The agreement on a call, and which call is the next one.
_AGREEMENT = (
    _fault(
        "digest-without-arguments",
        "_comm/control/protocol.py",
        "{self.operation}{self.settings!r}\\0{self.content}",
        "{self.operation}\\0{self.content}",
        "Calls with another op, source or dimension agree.",
        f"{CONTRACT}/test_routes.py::test_every_divergence",
    ),
    _fault(
        "digest-without-the-value",
        "_comm/control/protocol.py",
        "{self.operation}{self.settings!r}\\0{self.content}",
        "{self.operation}{self.settings!r}",
        "Calls with tensors of another dtype or shape agree.",
        f"{CONTRACT}/test_routes.py::test_every_divergence",
    ),
    _fault(
        "group-broken-by-a-mismatch",
        "_comm/control/call.py",
        "                self._stage = Stage.FAILED_EVERYWHERE\n            raise",
        "                pass\n            raise",
        "After a mismatch, of which all members know, the group cannot be used any more.",
        f"{CONTRACT}/test_shared_memory.py::test_after_a_call_that_differs_the_next_one_works",
    ),
    _fault(
        "failure-of-a-rank-not-sent",
        "_comm/control/call.py",
        "                self._control.report(self, remote_error(error, own, self.text))",
        "                pass",
        "An error of one rank leaves the others waiting.",
        f"{CONTRACT}/test_divergences.py::test_an_error_of_one_rank_is_raised_on_all",
    ),
    _fault(
        "failure-in-data-not-sent",
        "_comm/control/call.py",
        '            self._control.leave_for_good(f"{self.text} failed with {type(error).__name__}: {error}")',
        "            pass",
        "A rank that fails after the agreement stays in the group, one step behind the others.",
        f"{CONTRACT}/test_shared_memory.py::test_rows_of_another_step_are_noticed",
        f"{CONTRACT}/test_extend.py::test_an_exception_in_the_block_is_raised_on_all",
        f"{CONTRACT}/test_extend.py::test_an_exchange_after_one_that_failed_is_an_error",
    ),
    _fault(
        "details-not-exchanged",
        "_comm/control/channel.py",
        "            if verdict.outcome is Outcome.DIFFERENT:",
        "            if False:",
        "Members whose calls differ go on.",
        f"{CONTRACT}/test_routes.py::test_every_divergence",
    ),
    _fault(
        "deadlock-not-reported",
        "_comm/control/registry.py",
        "                    locked.post(_waiting_frame(channel, call))",
        "                    pass",
        "Ranks that wait for each other in different groups wait until the timeout.",
        f"{CONTRACT}/test_divergences.py::test_ranks_that_wait_in_different_groups",
    ),
    _fault(
        "pending-calls-count-for-deadlocks",
        "_comm/control/turns.py",
        "(thread is threading.main_thread() or thread in rank_threads) and not _busy_queues",
        "thread is threading.main_thread() or thread in rank_threads",
        "Non-blocking calls in several groups are taken for a deadlock.",
        f"{CONTRACT}/test_non_blocking.py::test_a_pending_call_of_one_rank_is_not_taken_for_a_deadlock",
    ),
    _fault(
        "collective-in-a-section-not-refused",
        "_comm/control/turns.py",
        "            if outer._blocks_collectives and",
        "            if not outer._blocks_collectives and",
        "A collective inside of a block, for whose end other ranks wait, begins.",
        f"{CONTRACT}/test_rank_control.py::test_a_collective_inside_of_a_block_is_an_error_in_every_world",
    ),
    _fault(
        "other-thread-not-refused",
        "_comm/control/turns.py",
        "        if not self._lock.acquire(blocking=False):\n            raise",
        "        if not self._lock.acquire():\n            raise",
        "Collectives of two threads of one rank are in an order that nobody has decided.",
        f"{CONTRACT}/test_concurrent_calls.py::test_another_thread_is_refused",
    ),
    _fault(
        "pending-calls-in-reverse-order",
        "_comm/control/turns.py",
        "self._calls.popleft()",
        "self._calls.pop()",
        "Ranks make their pending calls in different orders.",
        f"{CONTRACT}/test_non_blocking.py::test_results_are_those_of_blocking_calls",
        f"{CONTRACT}/test_random_works.py",
    ),
    _fault(
        "blocking-call-before-pending-ones",
        "_comm/control/turns.py",
        "        if self._last is not None:\n            self._last.wait(None)",
        "",
        "A blocking call does not wait for those that the program has made before.",
        f"{CONTRACT}/test_non_blocking.py::test_a_call_starts_at_once_and_a_blocking_one_runs_after_those_that_are_pending",
    ),
    _fault(
        "closed-group-with-open-children",
        "_comm/comm.py",
        "            child.shutdown(reason)",
        "            pass",
        "Groups that were made from a closed one, and their pairs, stay open.",
        f"{CONTRACT}/test_closing_groups.py::test_a_closed_group_releases_its_resources",
        f"{CONTRACT}/test_non_blocking_transfers.py::test_a_transfer_that_is_pending_in_a_closed_group_alone_ends",
    ),
)

# What the collectives return.
_COLLECTIVES = (
    _fault(
        "two-ranks-swapped-in-a-gather",
        "_comm/control/call.py",
        "        members = range(self._control.size)\n        verdict = self.agree(message, read=members)",
        "        members = range(self._control.size)[::-1]\n        verdict = self.agree(message, read=members)",
        "Gathered values are not in the order of ranks.",
        f"{CONTRACT}/test_gather_broadcast_scatter.py::test_all_gather_of_objects_keeps_the_order_of_ranks",
    ),
    _fault(
        "source-of-a-broadcast-not-compared",
        "_collectives/rooted.py",
        'call.settings = {"src": comm.ranks[sender]}',
        "call.settings = {}",
        "Ranks that name different sources agree.",
        f"{CONTRACT}/test_divergences.py::test_each_kind_of_mismatch",
    ),
    _fault(
        "scatter-gives-all-the-same",
        "_comm/control/call.py",
        "plain_loads(verdict.bodies[src])[own]",
        "plain_loads(verdict.bodies[src])[src]",
        "All ranks get the value of the source.",
        f"{CONTRACT}/test_gather_broadcast_scatter.py::test_scatter_gives_each_rank_its_own",
    ),
    _fault(
        "reduction-changes-its-argument",
        "_comm/reduce_ops.py",
        "            return wire.copy_(tensor)",
        "            return tensor.contiguous().to(wire_dtype)",
        "A reduction writes into the tensor that it was given.",
        f"{CONTRACT}/test_tensors.py",
        f"{CONTRACT}/test_reduction.py",
    ),
    _fault(
        "result-shares-memory-with-the-argument",
        "_collectives/serialization.py",
        "{device: data.clone() for device, data in self.buffers.items()}",
        "dict(self.buffers)",
        "The sender's own result is a view of what it has sent.",
        f"{CONTRACT}/test_gather_broadcast_scatter.py",
        f"{CONTRACT}/test_shared_values.py",
        f"{CONTRACT}/test_any_objects.py",
    ),
    _fault(
        "results-share-one-memory",
        "_collectives/reduce_request.py",
        "part.clone().reshape(shape)",
        "part.reshape(shape)",
        "Each result of a reduction keeps all others in memory.",
        f"{CONTRACT}/test_containers.py::test_many_tensors_keep_their_types_and_share_no_memory",
    ),
    _fault(
        "numbers-take-the-narrowest-type",
        "_collectives/scalars.py",
        "        widest = max(types, key=NUMBER_TYPES.index)",
        "        widest = min(types, key=NUMBER_TYPES.index)",
        "The sum of an integer and a float is rounded.",
        f"{CONTRACT}/test_containers.py::test_numbers_are_exact_and_take_the_widest_type",
    ),
    _fault(
        "mean-of-half-precision-overflows",
        "_comm/reduce_ops.py",
        "wire = torch.float32 if dtype in HALVES else dtype",
        "wire = dtype",
        "Sums of half-precision floats overflow before they are divided.",
        f"{CONTRACT}/test_reduction.py::test_mean_of_half_precision_does_not_overflow",
    ),
    _fault(
        "sum-of-bools-in-bytes",
        "_comm/reduce_ops.py",
        "    return ReductionRecipe.of(torch.int64, lambda result, _: result)\n",
        "    return ReductionRecipe.of(torch.uint8, lambda result, _: result)\n",
        "The sum of bools has another dtype, and overflows at 256 ranks.",
        f"{CONTRACT}/test_reduction.py::test_all_reduce_of_bool_tensors",
    ),
    _fault(
        "not-a-number-dropped",
        "_comm/reduce_ops.py",
        ".masked_fill_(values.isnan(), not_a_number)",
        "",
        "The minimum of a not-a-number and another number is that number.",
        f"{CONTRACT}/test_containers.py::test_not_a_number_wins_in_tensors_of_any_size",
        f"{CONTRACT}/test_reduction.py::test_not_a_number_wins",
    ),
    _fault(
        "mean-of-large-integers-overflows",
        "_comm/reduce_ops.py",
        "        if dtype == torch.int64:",
        "        if False:",
        "The mean of large integers is that of a sum which has wrapped around.",
        f"{CONTRACT}/test_reduction.py::test_the_mean_of_integers_does_not_overflow",
    ),
    _fault(
        "sums-in-another-order",
        "_comm/reduce_ops.py",
        "    for part in parts[2:]:",
        "    for part in parts[:1:-1]:",
        "Sums of floats depend on the transport, and differ in the last bits.",
        f"{CONTRACT}/test_shared_memory.py::test_reductions_are_folds_in_the_order_of_ranks[4ranks-dtype0-70001]",
    ),
    _fault(
        "staged-reduction-without-its-last-meeting",
        "_comm/data/staged_steps.py",
        "    has_end = True",
        "    has_end = False",
        "A member reads the slices of others before they have reduced them.",
        f"{CONTRACT}/test_shared_memory.py::test_reductions_are_folds_in_the_order_of_ranks",
        f"{CONTRACT}/test_shared_memory.py::test_calls_of_random_sizes_follow_each_other",
    ),
    _fault(
        "staged-rows-of-another-step",
        "_comm/data/staging.py",
        "        if written.count(self.step) != self.size:",
        "        if False:",
        "A member reads the rows of a call that has failed on another rank.",
        f"{CONTRACT}/test_shared_memory.py::test_rows_of_another_step_are_noticed",
    ),
    _fault(
        "async-call-in-the-group-of-all",
        "_collectives/non_blocking.py",
        "return collective(*arguments, group=Group(comm), **settings)",
        "return collective(*arguments, **settings)",
        "A non-blocking call of a group is one of all ranks.",
        f"{CONTRACT}/test_non_blocking.py::test_groups_do_not_wait_for_each_other",
    ),
    _fault(
        "differences-of-values-not-found",
        "_training/synced_values.py",
        "        if len(set(found)) > 1:\n            _raise",
        "        if len(set(found)) > len(found):\n            _raise",
        "Parameters that differ between ranks are said to be the same.",
        f"{CONTRACT}/test_synced_parameters.py::test_values_that_differ_are_named",
    ),
    _fault(
        "section-ends-before-its-owner",
        "_training/exclusive_section.py",
        "            failure = self._poll_result(self._store)",
        "            failure = None",
        "The other ranks do not wait for the one that runs first.",
        f"{CONTRACT}/test_training.py::test_rank_zero_first_runs_the_block_on_rank_zero_before_the_others",
    ),
    _fault(
        "error-in-a-section-on-one-rank-alone",
        "_training/exclusive_section.py",
        "        if failure is not None:\n            raise failure",
        "",
        "An error of rank zero is not raised on the ranks that waited for it.",
        f"{CONTRACT}/test_training.py::test_an_error_on_rank_zero_is_raised_on_all",
    ),
)

# The environment, and how ranks find each other.
_JOINING = (
    _fault(
        "slurm-before-the-launcher-inside",
        "_environment/detect.py",
        "    AZURE_ML,  # before Open MPI",
        "    _SLURM,\n    AZURE_ML,  # before Open MPI",
        "Ranks of an mpirun inside of Slurm take the place of its daemon.",
        "tests/environment/test_detect.py::test_the_innermost_launcher_is_believed",
    ),
    _fault(
        "local-rank-is-the-number-of-the-node",
        "_environment/schedulers.py",
        'read_int(environ, "SLURM_LOCALID")',
        'read_int(environ, "SLURM_NODEID")',
        "All tasks of a node have one local rank.",
        "tests/environment/test_recorded.py",
    ),
    _fault(
        "ranks-of-another-world-accepted",
        "_environment/detect.py",
        "        if outer.world_size.value not in {1, reading.world_size.value}:",
        "        if False:",
        "A RANK that was exported before srun is that of all its tasks.",
        "tests/environment/test_readers.py",
        "tests/environment/test_detect.py",
    ),
    _fault(
        "two-ranks-of-one-number",
        "_rendezvous/membership.py",
        "    if first.rank == second.rank:",
        "    if False:",
        "Two processes with one rank join a world.",
        "tests/session/test_membership.py::test_conflicts",
    ),
    _fault(
        "missing-rank-not-named",
        "_rendezvous/membership.py",
        "for rank in range(world_size) if rank not in arrived]",
        "for rank in range(world_size - 1) if rank not in arrived]",
        "The last rank is not named when it does not come.",
        "tests/session/test_membership.py",
        "tests/session/test_handshake.py::test_those_that_are_missing_are_named_to_all_that_came",
    ),
    _fault(
        "wrong-answer-accepted",
        "_rendezvous/handshake.py",
        "        if not hmac.compare_digest(message.answer.encode(), expected.encode()):",
        "        if not message.answer:",
        "A process that does not know the secret joins the world.",
        "tests/session/test_handshake.py::test_a_stranger_that_answers_wrongly_is_no_rank",
    ),
    _fault(
        "values-of-the-store-not-checked",
        "_rendezvous/signed_store.py",
        "        if not hmac.compare_digest(shown, self._code(key, value)):",
        "        if not shown:",
        "What another program writes into the store is believed.",
        "tests/test_job_secret.py::test_entries_of_a_store_without_the_secret_are_refused",
    ),
    _fault(
        "types-of-messages-not-checked",
        "_net/json_lines.py",
        "    if type(value) is not kind:",
        "    if False:",
        "A message of another program is taken for one of a rank.",
        "tests/session/test_membership.py::test_a_field_of_another_type_is_refused",
    ),
    _fault(
        "second-stranger-ends-the-search",
        "_rendezvous/handshake.py",
        "            if error.errno != errno.EADDRINUSE:",
        "            if error.errno:",
        "A derived port that is taken ends the job, though others follow.",
        "tests/session/test_handshake.py::test_derived_ports_walk_past_a_stranger",
    ),
    _fault(
        "device-of-another-local-rank",
        "_session/device.py",
        "        return local_rank\n",
        "        return 0\n",
        "All ranks of a host use its first device.",
        "tests/session/test_device.py",
    ),
    _fault(
        "group-of-other-code-closed",
        "_session/lifecycle.py",
        "        still_ours = dist.is_initialized() and dist.group.WORLD is self.group()",
        "        still_ours = dist.is_initialized()",
        "The end of a session destroys a process group that other code has opened since.",
        "tests/session/test_adoption.py::test_another_group_in_the_place_of_a_sessions_is_left_open",
    ),
    _fault(
        "forked-child-is-a-member",
        "_comm/control/control.py",
        "        if self.pid != os.getpid() and self.rank is not None:",
        "        if self.rank is None and self.closed:",
        "A forked child uses a group of its parent.",
        "tests/session/test_forks.py::test_a_forked_child_is_no_rank",
    ),
)

# Starting ranks, their output and their end.
_LAUNCH = (
    _fault(
        "nothing-swept",
        "_launch/supervisor.py",
        "        self._processes.sweep(keeps_services=keeps_services)\n",
        "",
        "What the ranks of an attempt have started runs on beside those of the next one.",
        "tests/launch/test_restarts.py::test_what_an_attempt_leaves_is_gone_before_the_next_one",
    ),
    _fault(
        "no-sigkill",
        "_launch/supervisor.py",
        "(*gentle, (signal.SIGKILL, _KILL_SECONDS))",
        "gentle",
        "A rank that ignores signals is ended by the last sweep, and reported as if another process had killed it.",
        "tests/launch/test_restarts.py::test_ranks_that_make_no_progress_are_not_restarted"
        "[8:hang 9:hang 10:return-0-rank 1 then was stopped (SIGKILL)]",
        limit=60,
    ),
    _fault(
        "ranks-outlast-the-launcher",
        "_launch/forkserver/server.py",
        "                    kill_descendants(self._groups, [*self._left, *kept])\n",
        "",
        "What ranks have started outlasts a launcher that was killed.",
        "tests/launch/test_traces.py::test_nothing_is_left_of_ranks_that_stay[SIGKILL-Python]",
    ),
    _fault(
        "id-without-kinship",
        "_launch/reaper.py",
        "is_kin = process.pid in descendants or _place(process) == own",
        "is_kin = True",
        "A job that a rank has submitted is killed with the rank, whose variable it has inherited.",
        "tests/launch/test_traces.py::test_the_id_of_a_launch_counts_only_for_its_kin",
    ),
    _fault(
        "random-state-of-the-server",
        "_launch/forkserver/worker.py",
        'modules["torch"].default_generator.seed()',
        "pass",
        "All ranks train on the same batches.",
        "tests/launch/test_preload.py::test_random_state_differs_between_ranks_and_attempts_as_between_new_processes",
    ),
    _fault(
        "empty-output-is-its-end",
        "_launch/output/stream_writer.py",
        "while (piece := self._next()) is not None:",
        "while piece := self._next():",
        "After the second progress bar on a terminal nothing is shown any more.",
        "tests/launch/test_output.py::test_bars_of_all_ranks_on_a_terminal_end_neither_the_output_nor_the_report",
        limit=60,
    ),
    _fault(
        "no-back-pressure",
        "_launch/output/stream_writer.py",
        "        return self._unwritten >= _BACKLOG_BYTES",
        "        return False",
        "Output that nobody reads fills the memory of the launcher.",
        "tests/launch/test_stuck_output.py::test_ranks_wait_for_a_reader_and_nothing_is_lost[True]",
    ),
    _fault(
        "lines-of-another-rank",
        "_launch/output/line_prefix.py",
        '    texts = {"rank": f"{rank:>',
        '    texts = {"rank": f"{nproc - 1 - rank:>',
        "Lines have the number of another rank.",
        "tests/launch/test_output.py::test_lines_are_whole_and_say_whose_they_are",
    ),
    _fault(
        "last-line-lost",
        "_launch/output/console.py",
        "        self._show(rest)\n\n    def _end_of",
        "\n    def _end_of",
        "The last line of a rank is lost if it has no end.",
        "tests/launch/test_output.py::test_a_line_without_an_end_is_shown_at_the_end_on_its_own",
    ),
    _fault(
        "consequence-before-its-cause",
        "_launch/report.py",
        "        return rank.result.consequence, _ended_ns(rank)",
        "        return False, -_ended_ns(rank)",
        "The report begins with the rank that failed last, because of another one.",
        "tests/launch/test_functions.py::test_the_first_error_is_the_cause_though_its_rank_ends_last",
    ),
    _fault(
        "exit-status-of-signals",
        "_launch/report.py",
        "failure.exitcode > 0 else 128 - failure.exitcode",
        "failure.exitcode > 0 else 1",
        "A launcher whose rank was killed ends as after an error.",
        "tests/cli/test_command.py::test_a_rank_that_fails_ends_the_world_and_is_named",
    ),
    _fault(
        "restarts-without-progress",
        "_launch/attempt_history.py",
        "return alike and self.step is not None and self.step == other.step",
        "return False",
        "Ranks that fail again and again at one step are restarted.",
        "tests/launch/test_restarts.py::test_when_no_other_attempt_follows",
    ),
    _fault(
        "one-restart-more",
        "_launch/attempts.py",
        "restarts_left=spec.options.max_restarts)",
        "restarts_left=spec.options.max_restarts + 1)",
        "Ranks are started more often than allowed.",
        "tests/launch/test_torchrun.py::test_ranks_are_started_again_as_often_as_allowed",
    ),
    _fault(
        "out-of-memory-not-recognized",
        "_launch/oom.py",
        "        if count > before.get(whose, count):",
        "        if count < before.get(whose, count):",
        "A rank that the kernel killed for want of memory is said to have been killed.",
        "tests/launch/test_memory.py::test_a_groups_count_is_read",
    ),
    _fault(
        "result-of-another-rank",
        "_launch/functions.py",
        "for rank in sorted(ranks)]",
        "for rank in sorted(ranks, reverse=True)]",
        "The results of a function are not in the order of ranks.",
        "tests/launch/test_functions.py::test_results_come_back_by_rank",
    ),
    _fault(
        "host-never-late",
        "_launch/other_hosts/watchdog.py",
        "if now - heard > limit}",
        "if now - heard > 1000 * limit}",
        "A host that does not answer is not noticed.",
        "tests/launch/test_hosts_launch.py",
    ),
    _fault(
        "usage-is-an-error",
        "cli/main.py",
        "_MISUSED: Final = 2",
        "_MISUSED: Final = 1",
        "Scripts cannot tell misuse from a failed rank.",
        "tests/cli/test_command.py::test_misuse_is_one_clear_error[args14---module and --no-python exclude each other]",
    ),
)

# Tests in ranks, and the diagnosis of running jobs.
_TESTING = (
    _fault(
        "phases-not-awaited",
        "testing/_plugin/runner.py",
        "        return all(self._phase in result.phases or",
        "        return any(self._phase in result.phases or",
        "A rank begins the body of a test before others have set it up.",
        "tests/testing/test_plugin.py::test_worlds_that_pass_or_skip_and_markers_that_cannot_be_used",
        limit=60,
    ),
    _fault(
        "failed-rank-passes",
        "testing/_plugin/merged_report.py",
        "        if failures or stopped:",
        "        if stopped:",
        "A test that fails passes.",
        "tests/testing/test_plugins.py::test_reruns_run_in_ranks_again",
        limit=60,
    ),
    _fault(
        "place-of-another-rank",
        "_diagnose/watching.py",
        "    location = _usual_location(_samples_of(rank, apart_in))",
        "    location = _usual_location(_samples_of(0, apart_in))",
        "A rank is named with the place where another one is.",
        "tests/diagnose/test_watching.py",
    ),
    _fault(
        "slow-is-stuck",
        "_diagnose/watching.py",
        "    return len(_stacks(samples)) > 1 or ran",
        "    return ran",
        "A slow rank is said to be stuck.",
        "tests/diagnose/test_watching.py",
    ),
    _fault(
        "collective-that-came-is-missing",
        "_diagnose/hang_report.py",
        "    absent = [rank for rank, last in reached.items() if last < number]",
        "    absent = [rank for rank, last in reached.items() if last <= number]",
        "Ranks are said to be missing in the collective that they wait in.",
        "tests/diagnose/test_missing_calls.py",
    ),
)

FAULTS = (*_CHANNELS, *_AGREEMENT, *_COLLECTIVES, *_JOINING, *_LAUNCH, *_TESTING)
