"""All durations of the plugin: time limits, grace periods, and intervals of polling."""

from __future__ import annotations

from typing import Final

# The time limit of a test, where neither its marker nor `ranks_timeout` sets one.
TEST_SECONDS: Final = 60.0
# The longest time limit that a marker accepts.
LONGEST_TEST_SECONDS: Final = 7 * 24 * 3600.0
# For ranks to start, and to import the modules of the tests; measured apart from the time limit of the test.
START_SECONDS: Final = 120.0
# For the other ranks to end a phase after the first failure, before they are killed. Most end at once, with an error
# that names the rank that failed.
GRACE_AFTER_FAILURE_SECONDS: Final = 2.0
# For a rank to write its stacks. Every live rank can, since the signal handler is in C.
STACK_SECONDS: Final = 1.0
STACK_POLL_SECONDS: Final = 0.02
# For ranks that are replaced to tear down their fixtures of wider scope and write their coverage, and then to end.
TEARDOWN_SECONDS: Final = 60.0
PROCESS_END_SECONDS: Final = 5.0
# Added to the test's time limit for the timeout of its session, so that the plugin's timeout, whose report has the
# stack of each rank, comes first, also after hours in a debugger.
SESSION_EXTRA_SECONDS: Final = 24 * 3600.0
# One wait while a debugger is open, which suspends all time limits; repeated until the debugger is left.
DEBUGGER_WAIT_SECONDS: Final = 3600.0
# For a thread that is about to end, before it is reported as left behind by a test.
THREAD_EXIT_SECONDS: Final = 0.1
# For the rest of a line to come where Python does not buffer: it writes a text and its newline separately.
REST_OF_LINE_SECONDS: Final = 0.05
