"""Starting a collective without waiting for it: `async_op=True`.

The whole collective runs in the thread of its group, with its checks: an error of this rank is raised by `Work.wait`,
and on the other ranks too, as without `async_op`. Errors are raised at once if the call cannot be started: without a
session or group to call in, inside of another collective, or with arguments that `async_op` excludes.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NoReturn, TypeVar

import torch

from rankwise._arguments import as_bool
from rankwise._collectives.deferred import undeferred
from rankwise._collectives.pytree import PyTree
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call
from rankwise._comm.group import Group
from rankwise._comm.work import Work
from rankwise._session.current import rank_of_this_thread, session_of_this_thread
from rankwise._xla_use import DEVICE_TYPE, is_used
from rankwise.errors import CollectiveError, InvalidArgumentError, PayloadTypeError, RankwiseError

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
    name, on_xla = collective.__name__, are_on_xla(*arguments)
    return start_call(comm, name, run, async_op=async_op, differentiable=differentiable, on_xla=on_xla)


def start_call(
    comm: Comm,
    operation: str,
    run: Callable[[], T],
    *,
    async_op: object,
    differentiable: object = False,
    on_xla: bool = False,
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
        on_xla: There are tensors on XLA devices in its arguments.
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
        if on_xla:
            return comm.start(call, run, at_once=True)
        return comm.start(call, _in_state_of_caller(run), convert=undeferred if is_used() else None)
    except RuntimeError as error:
        if isinstance(error, RankwiseError):
            raise
        return _fail(call, CollectiveError(f"{call.text}: no thread can be started: {error}"))


def are_on_xla(*values: object) -> bool:
    """Return whether tensors on XLA devices are among some values, or in them as containers."""
    return is_used() and any(
        isinstance(leaf, torch.Tensor) and leaf.device.type == DEVICE_TYPE
        for value in values
        for leaf in ([value] if isinstance(value, torch.Tensor) else _leaves(value))
    )


def _leaves(value: object) -> Sequence[object]:
    try:
        return PyTree.of(value).leaves
    except PayloadTypeError:  # a value that cannot be reduced is no container
        return ()


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
    stream = _current_stream()
    help_device = _help_for_device() if is_used() else None

    def run_in_state() -> T:
        with ExitStack() as stack:
            if session is not None:
                stack.enter_context(rank_of_this_thread(session))
            if help_device is not None:
                help_device()
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(gradients))
            if stream is not None:  # the inputs are ready when the operations queued on it have ended
                stack.enter_context(stream)
            return run()

    return lambda: context.run(run_in_state)


def _help_for_device() -> Callable[[], None]:
    """Return a function that lets a thread help the rank of this one's XLA device."""
    from rankwise import _torch_xla  # noqa: PLC0415 - not needed without such devices

    return partial(_torch_xla.help_device, str(_torch_xla.device()))


def _current_stream() -> torch.Stream | None:
    """Return the current stream of the accelerator; None if there is none, or this process does not use it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not getattr(torch.get_device_module(accelerator), "is_initialized", bool)():
        return None
    return torch.accelerator.current_stream()
