"""Starting a collective without waiting for it: `async_op=True`.

The whole collective runs in the thread of its group, with its checks: an error of this rank is raised by `Work.wait`,
and on the other ranks too, as without `async_op`. Errors are raised at once if the call cannot be started: without a
session or group to call in, inside of another collective, or with arguments that `async_op` excludes.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final, Generic, NoReturn, TypeVar

import torch

from rankwise._arguments import as_bool
from rankwise._backends import opened_accelerator
from rankwise._collectives.deferred import undeferred
from rankwise._collectives.pytree import PyTree
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call
from rankwise._comm.group import Group
from rankwise._comm.work import Work
from rankwise._session.current import rank_of_this_thread, session_of_this_thread
from rankwise._xla_use import DEVICE_TYPE, is_used
from rankwise.errors import CollectiveError, InvalidArgumentError, RankwiseError

T = TypeVar("T")


def start(
    comm: Comm, collective: Callable[..., T], *arguments: object, async_op: object, **settings: object
) -> T | Work[T]:
    """Make a call of a collective without waiting for it, and return its `Work`; blocking if `async_op` is false.

    A collective calls this with itself and its arguments, but `group`, if its `async_op` is not False.

    Raises:
        InvalidArgumentError: `async_op` is not a bool, or excludes `differentiable`. The other ranks raise too.
        CollectiveError: The call is made inside of another one, or this process cannot start a thread.
    """

    def run() -> T:
        return collective(*arguments, group=Group(comm), **settings)

    differentiable = settings.get("differentiable", False)
    return start_call(
        comm, collective.__name__, run, async_op=async_op, differentiable=differentiable, values=arguments
    )


def start_call(
    comm: Comm,
    operation: str,
    run: Callable[[], T],
    *,
    async_op: object,
    differentiable: object = False,
    values: Sequence[object] = (),
) -> T | Work[T]:
    """Run a call after those of a group that are pending, and return its `Work`; at once if `async_op` is false.

    A call with tensors on XLA devices runs in this thread: torch_xla does not allow that two threads use a device, and
    executes what they start later, as it does with all operations.

    Raises as `start`.

    Args:
        comm: The group in whose order the call is.
        operation: The name of the public function.
        run: Makes the call in that group.
        async_op: The argument of the public function.
        differentiable: Its argument of this name.
        values: What the call uses: tensors, or containers of tensors.
    """
    call = comm.call(operation)
    try:
        is_async = as_bool(async_op, "async_op")
        is_differentiable = as_bool(differentiable, "differentiable")
    except InvalidArgumentError as error:
        return _fail(call, error)
    if is_async and is_differentiable:
        text = "differentiable=True and async_op=True cannot be combined: leave one of them out"
        return _fail(call, InvalidArgumentError(text))
    if not is_async:
        return run()
    try:
        if are_on_xla(*values):
            return comm.start(call, run, at_once=True)
        caller = _current_stream()
        if caller is not None:
            on_stream = _OnStreamOfGroup(comm, run, caller, values)
            return comm.start(call, _in_state_of_caller(on_stream.run), convert=on_stream.hand_over)
        return comm.start(call, _in_state_of_caller(run), convert=undeferred if is_used() else None)
    except RuntimeError as error:
        if isinstance(error, RankwiseError):
            raise
        return _fail(call, CollectiveError(f"{call.text}: no thread can be started: {error}"))


def are_on_xla(*values: object) -> bool:
    """Return whether tensors on XLA devices are among some values, or in them as containers."""
    return is_used() and any(tensor.device.type == DEVICE_TYPE for tensor in _tensors_in(values))


def _tensors_in(values: Sequence[object]) -> Iterator[torch.Tensor]:
    """Iterate over the tensors among some values, and in them as containers."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
            continue
        with suppress(Exception):  # what is no container; an error of a value is raised by the call
            yield from (leaf for leaf in PyTree.of(value).leaves if isinstance(leaf, torch.Tensor))


def _fail(call: Call, error: Exception) -> NoReturn:
    """Raise an error of this rank on all ranks."""
    with call:
        raise error
    raise error  # not reached: no context manager of a comm suppresses errors


def _in_state_of_caller(run: Callable[[], T]) -> Callable[[], T]:
    """Return a function that runs another one with the state of this thread: context variables, session, torch's modes.

    Autocast, the default device and dispatch modes are not part of it: collectives do not depend on them.
    """
    context = contextvars.copy_context()
    session = session_of_this_thread()
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    help_device = _help_for_device() if is_used() else None

    def run_in_state() -> T:
        with ExitStack() as stack:
            if session is not None:
                stack.enter_context(rank_of_this_thread(session))
            if help_device is not None:
                help_device()
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(gradients))
            return run()

    return lambda: context.run(run_in_state)


class _OnStreamOfGroup(Generic[T]):
    """A call on the stream of its group: after what its caller has queued before it, and before what uses the result.

    Were the operations of all groups on the streams of their callers, they would be in one order there: the order in
    which the threads of the groups come to it. Another rank may have another order, and then each waits for the other.
    """

    def __init__(self, comm: Comm, run: Callable[[], T], caller: torch.Stream, values: Sequence[object]) -> None:
        if comm not in _streams:
            _streams[comm] = torch.Stream(caller.device)
        self._stream = _streams[comm]
        self._run = run
        self._inputs_ready = caller.record_event()
        self._ended: torch.Event | None = None
        self._keep_memory(values, self._stream)

    def run(self) -> T:
        """Run the call, in the thread of the group."""
        with self._stream:
            self._stream.wait_event(self._inputs_ready)
            result = self._run()
            self._ended = self._stream.record_event()
        return result

    def hand_over(self, result: T) -> T:
        """Let the current stream wait for the call, in the thread that takes the result."""
        current = torch.accelerator.current_stream(self._stream.device)
        if self._ended is not None:
            current.wait_event(self._ended)
        self._keep_memory([result], current)
        return result

    def _keep_memory(self, values: Sequence[object], stream: torch.Stream) -> None:
        """Let the memory of tensors that are released be used again only when a stream has finished with it."""
        for tensor in _tensors_in(values):
            has_memory = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # a DTensor wraps others
            if has_memory and tensor.device == stream.device and tensor.layout is torch.strided:
                tensor.record_stream(stream)


# The stream of each group that has made such a call.
_streams: Final[weakref.WeakKeyDictionary[Comm, torch.Stream]] = weakref.WeakKeyDictionary()


def _help_for_device() -> Callable[[], None]:
    """Return a function that lets a thread help the rank of this one's XLA device."""
    from rankwise import _torch_xla  # noqa: PLC0415 - not needed without such devices

    return partial(_torch_xla.help_device, str(_torch_xla.device()))


def _current_stream() -> torch.Stream | None:
    """Return the current stream of the accelerator; None if there is none, or this process does not use it."""
    return None if opened_accelerator() is None else torch.accelerator.current_stream()
