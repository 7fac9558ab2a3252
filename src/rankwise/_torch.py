"""The only module that uses private names of torch, each with the version that it was checked with."""

# ruff: noqa: SLF001 - the purpose of this module

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

# The functions that pickles of tensors refer to, as modules and names. Checked on 2.13.
# Torch's keeps each sparse tensor in a list, to be validated at the end of torch.load, and nobody else empties it.
REBUILD_SPARSE: Final = ("torch._utils", "_rebuild_sparse_tensor")
REBUILD_STORAGE: Final = ("torch.storage", "_load_from_bytes")
# Of tensors on XLA devices. The names end with what they rebuild from.
REBUILD_ON_DEVICE: Final = ("torch._utils", "_rebuild_device_tensor_from_")


@contextmanager
def listening_on(interface: str) -> Iterator[None]:
    """Make process groups that are opened inside listen on this network interface, unless the user chose another.

    Checked on 2.13: gloo reads GLOO_SOCKET_IFNAME with C's getenv whenever it opens a group, and
    `init_process_group(pg_options=)` ignores options for gloo. NCCL reads its variable when it connects for the first
    time. The variables are set with C's putenv and removed again; `os.environ` never has them.

    Args:
        interface: Its name; "" to leave the choice to gloo, which takes the address that the host's name resolves to.
    """
    names = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface and name not in os.environ]
    for name in names:
        os.putenv(name, interface)
    try:
        yield
    finally:
        for name in names:
            os.unsetenv(name)


def keep_gloo_on(interface: str) -> Callable[[], None]:
    """Make all process groups listen on this network interface, unless the user chose one; return how to undo it.

    Those that other code makes, too: DDP, FSDP, device meshes.

    Args:
        interface: Its name; "" to change nothing.
    """
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ or not interface:
        return lambda: None
    os.environ[name] = interface
    return lambda: _unset(name, interface)


def _unset(name: str, value: str) -> None:
    if os.environ.get(name) == value:
        del os.environ[name]


def announced_each_round(handler: RendezvousHandler) -> RendezvousHandler:
    """Make the first node of a c10d rendezvous announce the store of the ranks in each round, and return the handler.

    Checked on 2.13: a handler keeps the address of that store from its first round, and does not write it again
    (`_bootstrap_store_info`), so that a node which joins in a later round waits for it without end.
    """
    usual = handler.next_rendezvous

    def next_rendezvous() -> RendezvousInfo:
        handler._bootstrap_store_info = None  # type: ignore[attr-defined]
        return usual()

    handler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
    return handler


def hosts_that_met(handler: RendezvousHandler) -> tuple[list[str], bool]:
    """Return the names of the hosts that have joined a c10d rendezvous, and whether this one is beyond their number.

    Checked on 2.13: a handler has the last state that it has read (`_state_holder`), and its own name (`_this_node`).
    """
    state = handler._state_holder.state  # type: ignore[attr-defined]
    own = handler._this_node  # type: ignore[attr-defined]
    return sorted(node.addr for node in state.participants), own in state.redundancy_list


@contextmanager
def local_group_name(name: str) -> Iterator[None]:
    """Set the name of a process group that is created inside by its members alone, the same on all of them.

    Checked on 2.13: the members find each other in the store by the group's name, and torch derives that from the
    number of groups in the process (`_process_group_name`). If that differs between members, they wait for each other
    until the timeout.
    """
    module = sys.modules["torch.distributed.distributed_c10d"]
    usual = module._process_group_name
    module._process_group_name = lambda ranks, use_hashed_name: name if use_hashed_name else usual(ranks, False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module._process_group_name = usual  # type: ignore[attr-defined]


def keep_groups_for_good() -> None:
    """Keep the process groups of this process from ever being released: for forked children.

    Checked on 2.13: releasing a group of gloo, or a store that is served here, waits for their threads, which a forked
    child does not have; `_world.pg_map` has all groups with their stores. So they get a reference that is never
    released, not even when the interpreter exits.
    """
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None:
        return
    import ctypes  # noqa: PLC0415 - torch has loaded it

    for group, opened in world.pg_map.items():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened))


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Open torch's fake process group, which does not communicate, as the default one, and close it again.

    Checked on 2.13: it is part of torch's test suite; importing it registers the backend. Its operations leave the
    output buffers as they are.
    """
    from torch.distributed import destroy_process_group, init_process_group  # noqa: PLC0415 - loaded by few
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    hook = sys.excepthook
    init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        destroy_process_group()
        sys.excepthook = hook


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is the result of `torch.compile`.

    Checked on 2.13: the class has no public name. If its module is not loaded, nothing has been compiled.
    """
    home = sys.modules.get("torch._dynamo.eval_frame")
    return home is not None and isinstance(module, home.OptimizedModule)


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` has compiled, or the module itself if it is not compiled.

    Checked on 2.13: the names of a compiled module's parameters begin with that of the attribute.
    """
    original: Any = module._orig_mod if is_compiled(module) else module
    return original  # type: ignore[no-any-return]  # it is a module


def run_uncompiled(function: FunctionType) -> None:
    """Make code that `torch.compile` has compiled call a function as it is: as `torch.compiler.disable` does.

    Checked on 2.13: the attribute ends the graph before a call, and the strategy is for the frames below the call.
    `torch.compiler.disable` puts another function around it, and imports the compiler, which takes a second.
    """
    from torch._C._dynamo import eval_frame  # noqa: PLC0415 - only callers that have torch come here

    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def dispatch_mode_counter() -> Callable[[], int]:
    """Return the function of torch that returns the number of modes of `__torch_dispatch__` that are active.

    Checked on 2.13. Collectives call it directly: it is 0 in nearly all of them.
    """
    import torch  # noqa: PLC0415 - only callers that have torch come here

    return torch._C._len_torch_dispatch_stack


def makes_fake_tensors() -> bool:
    """Return whether FakeTensorMode, one of the modes of `__torch_dispatch__`, is active: new tensors have no memory.

    Checked on 2.13.
    """
    import torch  # noqa: PLC0415 - only callers that have torch come here

    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def flattened_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh of one dimension that `_flatten()` has made of a mesh of several, or None.

    Checked on 2.13: the mesh that others were sliced from has them by name.
    """
    ranks = mesh.mesh.flatten().tolist()
    flattened = mesh._get_root_mesh()._flatten_mapping.values()
    return next((other for other in flattened if other.mesh.tolist() == ranks), None)


def transformation_test() -> Callable[[torch.Tensor], bool]:
    """Return the function of torch whose result is whether a tensor is a wrapper inside a function of torch.func.

    Such functions are those that vmap, grad and jvp transform. Checked on 2.13. Collectives call it directly.
    """
    import torch  # noqa: PLC0415 - only callers that have torch come here

    return torch._C._functorch.is_functorch_wrapped_tensor


def copy_each(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each of some tensors into another one; for small ones, it takes a third of the time of a loop.

    Checked on 2.13.
    """
    import torch  # noqa: PLC0415 - only callers that have torch come here

    torch._foreach_copy_(targets, values)


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective of torch, which may not have ended; other tensors as they are.

    Checked on 2.13.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is not None and isinstance(tensor, module.AsyncCollectiveTensor):
        result: torch.Tensor = tensor.wait()
        return result
    return tensor


def without_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a subclass as a plain `torch.Tensor`, whatever `__torch_function__` the subclass has.

    Checked on 2.13.
    """
    import torch  # noqa: PLC0415 - only callers that have torch come here

    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def has_expanded_view(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor on an XLA device may share memory, which its strides do not show.

    Torch keeps the views that such a tensor was made by, and after a write applies their inverses to what it is a view
    of: that of `expand` adds the elements up. Of a tensor that does not refer to that, any `expand` counts. So does any
    `as_strided` and `unfold`, even where no elements share memory: torch_xla 2.9 writes some of these elsewhere.

    Checked on 2.9 and 2.13.
    """
    import torch  # noqa: PLC0415 - only callers that have torch come here

    if not torch._is_functional_tensor(tensor):  # type: ignore[no-untyped-call,attr-defined,unused-ignore]
        return False
    functionalization: Any = torch._C._functionalization
    views = functionalization.get_view_meta_sequence(tensor)
    if any(
        isinstance(view, (functionalization.as_strided_ViewMeta, functionalization.unfold_ViewMeta)) for view in views
    ):
        return True
    expanded = [place for place, view in enumerate(views) if isinstance(view, functionalization.expand_ViewMeta)]
    if not expanded or tensor._base is None:
        return bool(expanded)
    base = torch.empty_like(tensor._base, device="meta")
    sizes = [functionalization.apply_view_meta_sequence(base, views[:place]).numel() for place in range(len(views) + 1)]
    return any(sizes[place] < sizes[place + 1] for place in expanded)


# The variables for the number of collectives that flight recorders keep: the present one, and an older one of NCCL.
_RECORDER_SIZES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


@contextmanager
def flight_recorder(entries: int) -> Iterator[None]:
    """Make the flight recorder keep so many collectives, unless the user chose a number, for a group that is opened.

    Checked on 2.13: the first process group reads TORCH_FR_BUFFER_SIZE with C's getenv, and the default is 2000. Each
    entry makes the record slower to read. As by `listening_on`, `os.environ` never has the variable.
    """
    if any(name in os.environ for name in _RECORDER_SIZES) or not entries:
        yield
        return
    os.putenv(_RECORDER_SIZES[0], str(entries))
    try:
        yield
    finally:
        os.unsetenv(_RECORDER_SIZES[0])


def recorded_backends() -> set[str]:
    """Return the backends whose collectives are in a flight record: none, if the user has switched that off."""
    is_off = any(os.environ.get(name, "").strip() == "0" for name in _RECORDER_SIZES)
    return set() if is_off else set(_recorders())


def flight_records(*, collectives: bool) -> dict[str, dict[str, Any]]:
    """Return torch's flight record of each backend that has one.

    "entries" are the collectives, the oldest first; "pg_status" has the last one that was begun, and the last one that
    has ended, of each group since the process was started.

    Checked on 2.13: gloo and NCCL have recorders of their own, NCCL's only in builds for CUDA. The status alone takes a
    tenth of a millisecond.

    Args:
        collectives: With the collectives.
    """
    return {backend: json.loads(dump(includeCollectives=collectives)) for backend, dump in _recorders().items()}


def _recorders() -> dict[str, Any]:
    import torch  # noqa: PLC0415 - only callers that have torch come here

    module = torch._C._distributed_c10d
    names = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    return {backend: getattr(module, name) for backend, name in names.items() if hasattr(module, name)}


def open_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that are open, also those that other code has made.

    Checked on 2.13.
    """
    import torch.distributed as dist  # noqa: PLC0415 - only callers that have torch come here

    return list(dist.distributed_c10d._world.pg_map)


def ranks_of_groups() -> dict[str, list[int]]:
    """Return the global ranks of each process group that is open, by its name in the flight recorder."""
    import torch.distributed as dist  # noqa: PLC0415 - only callers that have torch come here

    return {str(group.group_name): sorted(dist.get_process_group_ranks(group)) for group in open_groups()}
