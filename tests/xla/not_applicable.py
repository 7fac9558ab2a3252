"""The tests with ranks that cannot run where the ranks are threads of one process, each with the reason.

A name is a pattern, as of `fnmatch`: the file, the test, and its parameters after a hyphen. A test is in
`NOT_APPLICABLE` if it means nothing there, and in `KNOWN_FAILURES` if it fails, with the cause.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

import pytest

_GROUP = "a session on XLA devices has no process group of torch"
_MAIN = "the ranks have one __main__ module, and here it differs between them"
_SIGNAL = "only the main thread can have signal handlers, and it is no rank"
_THREAD = "a session belongs to the thread of its rank; other threads that the rank starts have none"
_LOG = "counts log messages, and those of all ranks are in one log"
_ROUTE = "changes the routes of calls in the whole process, and takes one that ranks on XLA devices do not have"
_PATCH = "changes a class in the whole process, under the other ranks"
_COUNTED = "counts descriptors and threads of the process, where other ranks connect meanwhile"
_AT_ONCE = "a non-blocking call with tensors on XLA devices is made at once, so that different orders are a deadlock"
_SHARED = "threads have no memory that processes share"
_MEMORY = "tensors on XLA devices have values, and no memory"
_SPARSE = "torch_xla has no sparse tensors"
_KINDS = "torch_xla cannot make these tensors, or some of those that the test takes: complex32, sparse, nested, freed"
_DRAWN = "hypothesis keeps state in the process, so that ranks in threads may draw different examples"
_TANGENTS = "torch has one level of tangents in a process: other ranks enter it meanwhile"

NOT_APPLICABLE: Final = {
    "test_adopted_groups.py::*": _GROUP,
    "test_awaiting.py::test_a_call_that_is_refused_is_named*": _THREAD,
    "test_closing_groups.py::test_a_process_group_that_other_code_destroyed*": _GROUP,
    "test_concurrent_calls.py::test_a_signal_handler_is_refused-*": _SIGNAL,
    "test_concurrent_calls.py::test_a_signal_handler_is_refused_while_its_rank_waits*": _SIGNAL,
    "test_concurrent_calls.py::test_another_thread_is_refused-*": _THREAD,
    "test_concurrent_calls.py::test_another_thread_is_refused_between_the_agreement_on_a_call_and_its_data*": _THREAD,
    "test_concurrent_calls.py::test_another_thread_is_refused_while_any_collective_waits*": _THREAD,
    "test_concurrent_calls.py::test_every_collective_in_another_thread_is_refused_also_a_non_blocking_one*": _THREAD,
    "test_differentiable.py::test_tangents_are_refused_where_they_would_be_lost*": _TANGENTS,
    "test_differentiable.py::test_transforms_of_functions_are_refused-*": _TANGENTS,
    "test_main_definitions.py::test_a_definition_on_one_rank_is_sent_with_its_values*": _MAIN,
    "test_main_definitions.py::test_a_definition_that_cannot_be_sent_is_named*": _MAIN,
    "test_main_definitions.py::test_a_definition_that_differs_between_ranks_is_the_senders*": _MAIN,
    "test_main_definitions.py::test_ranks_that_run_different_scripts*": _MAIN,
    "test_non_blocking.py::test_a_signal_handler_may_start_a_call_while_the_program_waits*": _SIGNAL,
    "test_non_blocking.py::test_works_that_nobody_waits_for_are_logged_when_their_group_is_closed*": _LOG,
    "test_non_blocking_transfers.py::test_threads_use_the_two_directions_at_once*": _THREAD,
    "test_awaiting.py::test_several_are_awaited_at_once_in_different_groups-*-xla": _AT_ONCE,
    "test_closing_groups.py::test_a_closed_group_releases_its_resources-*": _COUNTED,
    "test_closing_groups.py::test_300_groups_take_few_descriptors_and_leave_none-*": _COUNTED,
    "test_closing_groups.py::test_unreferenced_groups_are_closed_*": _COUNTED,
    "test_differentiable.py::test_gradients_need_floats_or_complex_numbers-*-xla*": _SPARSE,
    "test_extend.py::test_misuse_of_an_exchange_is_an_error_on_all_ranks*-xla": _SPARSE,
    "test_gradients.py::test_a_gradient_that_becomes_sparse-*-xla": _SPARSE,
    "test_gradients.py::test_sums-*-xla": _SPARSE,
    "test_gradients.py::test_gradients_with_memory_in_common-*-xla": _MEMORY,
    "test_gradients.py::test_no_memory_that_was_not_written_gets_into_gradients-*-xla*": _SPARSE,
    "test_gradients.py::test_other_forms_of_gradients_stay_where_they_are-*-xla": _MEMORY,
    "test_non_blocking.py::test_groups_do_not_wait_for_each_other-*-xla": _AT_ONCE,
    "test_non_blocking.py::test_a_call_that_begins_while_the_next_one_is_started_is_not_in_its_way-*": _PATCH,
    "test_random_values.py::*-[24]devices-*": _DRAWN,
    "test_any_objects.py::test_random_objects-*[24]devices-*": _DRAWN,
    "test_any_objects.py::test_objects_of_every_kind-*-xla": _SPARSE,
    "test_rank_control.py::test_a_long_wait_for_a_block_is_explained_once-*": _LOG,
    "test_reduction_in_place.py::test_memory_that_is_there_twice-*-xla": _MEMORY,
    "test_reduction.py::test_values_that_cannot_be_reduced_are_refused_in_every_world-*-xla": _SPARSE,
    "test_training.py::*sparse*-xla": _SPARSE,
    **{
        f"test_unusual_tensors.py::test_tensors_that_cannot_be_reduced_are_refused*-xla-{kind}": _KINDS
        for kind in ("sparse", "freed", "complex32")
    },
    "test_unusual_tensors.py::test_nested_tensors_are_gathered-*-xla": _KINDS,
    "test_local_failures.py::*-xla-*sparse*": _SPARSE,
    "test_ops.py::test_every_op_gives_one_result_by_every_route-*": _ROUTE,
    "test_routes.py::*": _ROUTE,
    "test_non_blocking.py::test_a_thread_that_cannot_be_started_is_an_error_on_all-*": _PATCH,
    "test_shared_memory.py::*": _SHARED,
    "test_store.py::test_a_wait_is_interrupted_by_a_signal*": _SIGNAL,
    "test_shared_values.py::*": _SHARED,
    "test_store.py::test_threads_use_the_store_at_once*": _THREAD,
    "test_synced_parameters.py::test_wrap_ddp-*": _GROUP,
    "test_transfers.py::*": _SHARED,
    "test_torch_groups.py::test_a_destroyed_process_group_is_an_error*": _GROUP,
    "test_torch_groups.py::test_a_dimension_of_a_mesh_is_a_group*": _GROUP,
    "test_torch_groups.py::test_a_mesh_of_some_ranks*": _GROUP,
    "test_torch_groups.py::test_a_process_group_of_torch_is_a_group*": _GROUP,
    "test_torch_groups.py::test_errors_in_a_process_group_are_raised_on_its_members*": _GROUP,
    "test_torch_groups.py::test_process_groups_that_were_destroyed_are_let_go*": _GROUP,
}

# Tests that mean something there, and fail.
KNOWN_FAILURES: Final = {
    "test_gradient_runs.py::test_all_ranks_have_the_same_bits_after_200_steps-*-xla": (
        "torch_xla 2.9 crashes after some hundred collectives of the devices of a CPU, in a process with earlier tests"
    ),
    "test_reduction.py::test_all_reduce_of_tensors_keeps_type_and_shape-*-xla": (
        "torch_xla 2.9 takes one compiled graph for two that clone different inputs, in the test itself"
    ),
}


def reason_not_to_run(item: pytest.Item) -> str | None:
    """Return why a test cannot run in threads, or None."""
    name = f"{item.path.name}::{item.name.replace('[', '-').removesuffix(']')}"
    return next(
        (reason for pattern, reason in (NOT_APPLICABLE | KNOWN_FAILURES).items() if fnmatchcase(name, pattern)), None
    )
