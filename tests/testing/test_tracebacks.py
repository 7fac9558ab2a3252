"""The stacks of ranks, shortened to the frames that a user can act on."""

from __future__ import annotations

from rankwise.testing._plugin.tracebacks import trimmed

HEAD = "Thread 0x00007f (most recent call first):"
TEST = '  File "/project/test_x.py", line 3 in test_x'
PYTEST = '  File "/lib/_pytest/python.py", line 9 in pytest_pyfunc_call'
WORKER = '  File "/lib/rankwise/_launch/forkserver/worker.py", line 5 in main'
COLLECTIVE = '  File "/lib/rankwise/_collectives/reduce.py", line 7 in all_reduce'


def test_frames_that_run_the_test_are_left_out() -> None:
    assert trimmed(f"{HEAD}\n{COLLECTIVE}\n{TEST}\n{PYTEST}\n{WORKER}") == f"{HEAD}\n{COLLECTIVE}\n{TEST}"


def test_frames_of_the_launcher_are_left_out_where_no_test_runs() -> None:
    assert trimmed(f"{HEAD}\n{WORKER}") == HEAD
