"""Work: a collective that was started without waiting for its result. In which order works run: `control.turns`."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from rankwise._arguments import as_seconds
from rankwise._user_frames import is_user_frame, strip_internal_frames
from rankwise.errors import CollectiveError, CollectiveTimeoutError, NotJoinedError, RankwiseError, summary

T_co = TypeVar("T_co", covariant=True)

log = logging.getLogger(__name__)

# Held by the thread that converts the result of a call: see `StartedCall`.
_converting: Final = threading.RLock()


class WorkState:
    """The state of a work, without its result, so that it can be kept until the result is taken.

    Attributes:
        text: The call: "all_reduce at train.py:88".
        site: Its call site: "train.py:88".
        finished: Whether it has returned or raised. Read without a lock, so that a forked child can read it.
        error: The summary of its error; "" if it has raised none.
        future: Done when the work is finished.
    """

    __slots__ = ("error", "finished", "future", "site", "text")

    def __init__(self, operation: str, site: str) -> None:
        self.text = f"{operation} at {site}"
        self.site = site
        self.finished = False
        self.error = ""
        self.future: concurrent.futures.Future[None] = concurrent.futures.Future()
        # A future that runs cannot be cancelled, as by a task that awaits it: the other ranks wait for the call.
        self.future.set_running_or_notify_cancel()

    def wait(self, seconds: float | None) -> bool:
        """Wait until the work is finished; return False if it is not after so many seconds."""
        if self.finished:
            return True
        try:
            self.future.result(None if seconds is None else min(seconds, threading.TIMEOUT_MAX))
        except concurrent.futures.TimeoutError:
            return False
        return True


class UntakenWorks:
    """The works of a group whose result nobody has taken.

    Attributes:
        thread: The thread that runs the works; None while there are none.
        running: The text of the work that runs.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.running = ""
        self._states: dict[WorkState, None] = {}  # in the order of the program
        # The number of works that were released, by text and error.
        self._released: Counter[tuple[str, str]] = Counter()

    def add(self, state: WorkState) -> None:
        """Add a work that was started."""
        self._states[state] = None

    def take(self, state: WorkState) -> None:
        """Remove a work whose result is being taken."""
        self._states.pop(state, None)

    def release(self, state: WorkState) -> None:
        """Keep of a work that is being released no more than its text and error."""
        if state in self._states:
            self._states.pop(state, None)
            self._released[state.text, state.error] += 1

    def log_all(self) -> None:
        """Log the works, those of each line of the program once, and their errors; and forget them."""
        for state in list(self._states):
            self.release(state)
        counts: Counter[str] = Counter()
        for (text, _), count in self._released.items():
            counts[text] += count
        for text, count in counts.items():
            times = f", {count} times" if count > 1 else ""
            log.warning("started with async_op=True, and never waited for: %s%s", text, times)
        for text, error in self._released:
            if error:
                log.error("%s failed, and was never waited for: %s", text, error)
        self._released.clear()


class StartedCall(Generic[T_co]):
    """A collective that was started: the queue of its group runs it, and its `Work` takes the outcome.

    Attributes:
        state: Its state, which may be kept longer than the outcome.
        result: Its result, once it has ended without an error.
        error: Its error, to be raised with this `traceback`; None without one.
    """

    __slots__ = ("_convert", "_pid", "_rank", "_run", "_untaken", "error", "result", "state", "traceback")

    def __init__(
        self,
        state: WorkState,
        run: Callable[[], T_co],
        untaken: UntakenWorks,
        rank: int,
        convert: Callable[[T_co], T_co] | None = None,
    ) -> None:
        """Keep a collective until it is run.

        Args:
            state: Its state.
            run: Runs it.
            untaken: The works of its group.
            rank: The global rank of this process.
            convert: Converts the result, once, in the thread that takes it first; its error is that of the collective.
        """
        self.state = state
        self._run: Callable[[], T_co] | None = run
        self._untaken = untaken
        self._rank = rank
        self._pid = os.getpid()
        self._convert = convert
        self.result: T_co = None  # type: ignore[assignment]  # until the collective has ended
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None

    def __del__(self) -> None:
        self._untaken.release(self.state)

    def execute(self) -> None:
        """Run the collective, in the thread of its group."""
        run, self._run = self._run, None
        try:
            if run is not None:
                self.result = run()
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it is raised where the result is taken
            self._fail(error)
        finally:
            del run  # and with it the arguments: they are not kept until the result is taken
            self.state.finished = True
            self.state.future.set_result(None)

    def abandon(self, reason: str) -> None:
        """End the collective with an error, without running it."""
        self._run = None
        self._fail(CollectiveError(f"{self.state.text} was not made: {reason}"))
        self.state.error = ""  # the end of its group has a cause of its own
        self.execute()

    def require_waitable(self) -> None:
        """Check that waiting for the collective can end.

        Raises:
            NotJoinedError: This process was forked while it was pending.
            CollectiveError: It runs in this thread, or will.
        """
        if self.state.finished:
            return
        if self._pid != os.getpid():
            raise NotJoinedError.forked(self._rank)
        if self._untaken.thread is threading.current_thread():
            raise CollectiveError(
                f"{self.state.text} cannot be waited for inside of {self._untaken.running}: it cannot end before that"
            )

    def take(self) -> None:
        """Record that the outcome is taken, and convert the result, unless another thread has."""
        self._untaken.take(self.state)
        if self._convert is None:
            return
        with _converting:
            try:
                if self._convert is not None and self.error is None:
                    self.result = self._convert(self.result)
            except Exception as error:  # noqa: BLE001 - raised by every call that takes the result
                self._fail(error)
            finally:
                self._convert = None

    def _fail(self, error: BaseException) -> None:
        strip_internal_frames(error.__traceback__, error)
        self.error, self.traceback = error, error.__traceback__
        if isinstance(error, RankwiseError) and not sys.flags.dev_mode:
            in_user_code = any(is_user_frame(frame) for frame, _ in traceback.walk_tb(error.__traceback__))
            self.traceback = error.__traceback__ if in_user_code else None
        error.add_note(f"Raised by {self.state.text}, which was started with async_op=True.")
        self.state.error = summary(error)


class Work(Generic[T_co]):
    """A collective that was started with `async_op=True`, and its result.

    The calls of a group run in the order in which the program makes them, also if some of them are blocking; those of
    different groups run at the same time. Results may be waited for in any order and in any thread, and with `await` in
    an asyncio program. Values that were passed must not be changed before the result is there. On an accelerator, the
    result is ready for the stream that is the current one where the result is first taken.

    A work that nobody has waited for is logged, with its error, when its group or session is closed.
    """

    __slots__ = ("__weakref__", "_call", "_state")

    def __init__(self, call: StartedCall[T_co]) -> None:
        self._call = call
        self._state = call.state

    def __repr__(self) -> str:
        return f"<Work {self._state.text}, {'done' if self._state.finished else 'pending'}>"

    def done(self) -> bool:
        """Return whether the collective has ended, with a result or an error.

        Local.

        Example:
            >>> import rankwise
            >>> work = rankwise.all_reduce(1, async_op=True)
            >>> work.wait(), work.done()  # on 2 ranks: (2, True)
            (1, True)
        """
        return self._state.finished

    def wait(self, timeout: float | None = None) -> T_co:
        """Wait for the collective, and return its result; further calls return the same object.

        Local: ranks may wait in different orders, or not at all.

        Args:
            timeout: Seconds to wait; until the collective ends by default, which may take the session's timeout.

        Raises:
            CollectiveTimeoutError: It has not ended within `timeout`. It is still pending, and can be waited for again.
            InvalidArgumentError: `timeout` is not a number of seconds above 0.
            CollectiveError: This is called inside of the collective, or of an earlier one of its group: as by a value
                that is being pickled.
            NotJoinedError: It was started in another process, from which this one was forked.
            RankwiseError: The error of the collective, the same as without `async_op=True`.

        Example:
            >>> import rankwise
            >>> loss, seen = (rankwise.all_reduce(value, async_op=True) for value in (0.5, 8))
            >>> seen.wait(), loss.wait()  # on 2 ranks: (16, 1.0)
            (8, 0.5)
        """
        seconds = None if timeout is None else as_seconds(timeout, "timeout")
        self._call.require_waitable()
        if not self._state.wait(seconds):
            raise CollectiveTimeoutError(f"{self._state.text} has not ended within {seconds:g} s, and is still pending")
        self._call.take()
        if self._call.error is not None:
            raise self._call.error.with_traceback(self._call.traceback)
        return self._call.result

    def __await__(self) -> Generator[Any, None, T_co]:
        """Wait for the collective without blocking the running event loop of asyncio."""
        import asyncio  # noqa: PLC0415 - a program with an event loop has imported it

        self._call.require_waitable()
        if not self._state.finished:
            yield from asyncio.wrap_future(self._state.future).__await__()
        self._call.take()
        if self._call.error is not None:
            raise self._call.error.with_traceback(self._call.traceback)
        return self._call.result
