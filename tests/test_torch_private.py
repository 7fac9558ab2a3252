"""Each private name of torch that `_torch.py` relies on, by itself; `make compat` runs this with other versions."""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh

from rankwise import _torch
from rankwise._net.host import loopback_interface
from tests.lanes import variants

CHECKED: dict[str, Callable[[], None]] = {}
Check = TypeVar("Check", bound=Callable[[], None])


def checks(name: str) -> Callable[[Check], Check]:
    """Enter a function in the table as the check of a private name."""

    def enter(check: Check) -> Check:
        CHECKED[name] = check
        return check

    return enter


@contextmanager
def gloo_group() -> Iterator[None]:
    """Open a default process group of this process alone."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@checks("torch.distributed.distributed_c10d._process_group_name")
def process_group_name() -> None:
    """`new_group` names a group of its members alone by it."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    assert list(inspect.signature(distributed_c10d._process_group_name).parameters) == ["ranks", "use_hashed_name"]
    with gloo_group():
        with _torch.local_group_name("given by rankwise"):
            group = dist.new_group([0], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        assert group.group_name == "given by rankwise"
        other = dist.new_group([0], use_local_synchronization=True)
        assert isinstance(other, dist.ProcessGroup)
        assert other.group_name != "given by rankwise"


@checks(
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler._bootstrap_store_info, "
    "DynamicRendezvousHandler._state_holder, DynamicRendezvousHandler._this_node"
)
def bootstrap_store_info() -> None:
    """A handler that has forgotten it announces the store of the ranks in each round, where others wait for that."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStoreInfo  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler  # noqa: PLC0415

    store = dist.HashStore()
    parameters = RendezvousParameters("c10d", "", "job", 1, 1, local_addr="127.0.0.1")
    handler = _torch.announced_each_round(create_handler(store, C10dRendezvousBackend(store, "job"), parameters))
    for _ in range(2):
        assert handler.next_rendezvous().store.check([RendezvousStoreInfo.MASTER_ADDR_KEY])
    assert _torch.hosts_that_met(handler) == (["127.0.0.1"], False)
    handler.shutdown()


@checks("torch.distributed.device_mesh.DeviceMesh._get_root_mesh._flatten_mapping")
def flatten_mapping() -> None:
    """It has the meshes that `_flatten()` has made; without it none is found, and the user passes the mesh itself."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
        assert _torch.flattened_mesh(mesh["a", "b"]) is None
        flattened = mesh["a", "b"]._flatten("ab")
        assert _torch.flattened_mesh(mesh["a", "b"]) is flattened


@checks("torch.distributed.distributed_c10d._world.pg_map")
def pg_map() -> None:
    """It has every open group, with its backend and its store."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    with gloo_group():
        group = dist.new_group([0])
        opened = distributed_c10d._world.pg_map
        assert set(opened) == {dist.group.WORLD, group}
        for backend, store in opened.values():
            assert backend == "gloo"
            assert isinstance(store, dist.Store)
    assert not distributed_c10d._world.pg_map


@checks("torch.distributed.distributed_c10d._world.pg_map, as the list of all groups")
def names_of_groups() -> None:
    """It has every open group, whose name is that in the flight recorder; without it, hang reports miss groups."""
    with gloo_group():
        dist.new_group([0])
        made = dist.new_group([0])
        assert list(_torch.ranks_of_groups().values()) == [[0], [0], [0]]
        assert _torch.open_groups()[0] is dist.group.WORLD
        assert made in _torch.open_groups()
    assert not _torch.ranks_of_groups()


@checks(
    "torch._C._distributed_c10d._dump_fr_trace_json, torch._C._distributed_c10d._dump_nccl_trace_json, "
    "TORCH_FR_BUFFER_SIZE in C's environment"
)
def flight_records() -> None:
    """They have the calls of each group in their order; the first group reads their size with C's getenv."""
    has_nccl = torch.version.cuda is not None or torch.version.hip is not None
    assert _torch.recorded_backends() == ({"gloo", "nccl"} if has_nccl else {"gloo"})
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    with _torch.flight_recorder(2000):
        assert getenv(b"TORCH_FR_BUFFER_SIZE") == b"2000"
        assert "TORCH_FR_BUFFER_SIZE" not in os.environ
        with gloo_group():
            dist.barrier()
            dist.all_reduce(torch.ones(1))
            (name,) = _torch.ranks_of_groups()
            own: list[dict[str, Any]] = [{"retired": False}]
            while not all(entry["retired"] for entry in own):  # a thread of gloo retires them
                time.sleep(0.001)
                entries = _torch.flight_records(collectives=True)["gloo"]["entries"]
                own = [entry for entry in entries if entry["process_group"][0] == name][-2:]
            assert [entry["profiling_name"] for entry in own] == ["gloo:barrier", "gloo:all_reduce"]
            assert own[1]["collective_seq_id"] == own[0]["collective_seq_id"] + 1
            assert all(not entry["is_p2p"] and entry["time_created_ns"] for entry in own)
            record = _torch.flight_records(collectives=False)["gloo"]
            assert "entries" not in record
            numbers = {"last_enqueued_collective": "2", "last_completed_collective": "2"}
            assert record["pg_status"][max(record["pg_status"], key=int)].items() >= numbers.items()
    assert getenv(b"TORCH_FR_BUFFER_SIZE") is None


@checks("torch.testing._internal.distributed.fake_pg.FakeStore")
def fake_store() -> None:
    """Importing its module registers the backend `fake`, whose collectives return immediately."""
    hook = sys.excepthook
    with _torch.fake_process_group(3, 1000):
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("fake", 3, 1000)
        dist.all_reduce(torch.ones(2))
    assert sys.excepthook is hook
    assert not dist.is_initialized()


@checks("torch._dynamo.eval_frame.OptimizedModule, OptimizedModule._orig_mod")
def optimized_module() -> None:
    """It is the class of the modules that `torch.compile` returns; in another process, since it leaves files."""
    program = (
        "import torch; from rankwise._torch import is_compiled, uncompiled; module = torch.nn.Linear(1, 1); "
        "compiled = torch.compile(module, backend='eager'); assert is_compiled(compiled); assert not is_compiled("
        "module); assert uncompiled(compiled) is module; assert uncompiled(module) is module; "
        "assert next(compiled.named_parameters())[0] == '_orig_mod.weight'"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr


@checks("torch._C._dynamo.eval_frame._FrameAction")
@checks("torch._C._dynamo.eval_frame._FrameExecStrategy")
def frame_strategy() -> None:
    """A strategy has an action for a frame, and one for those below it."""
    from torch._C._dynamo import eval_frame  # noqa: PLC0415

    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    assert strategy.cur_action == strategy.recursive_action == skip


@checks("torch._dynamo.eval_frame._torchdynamo_disable")
def uncompiled() -> None:
    """A function is called as it is by compiled code, with those that it calls; `id` would not be compiled."""
    program = """
import torch
from rankwise._torch import run_uncompiled
def innermost(x): return not torch.compiler.is_dynamo_compiling() and x.shape[0] == 3 and id(x) == id(x)
def inner(x): return innermost(x)
run_uncompiled(inner)
compiled = torch.compile(lambda x: (inner(x * 2), x + 1), backend="eager")
frames = torch._dynamo.utils.counters["frames"]
assert compiled(torch.ones(3))[0] is True
assert frames["ok"] == frames["total"] == 2, frames
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr


@checks("torch._C._len_torch_dispatch_stack")
def dispatch_stack() -> None:
    """It counts the dispatch modes in force."""
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415

    assert torch._C._len_torch_dispatch_stack() == 0
    with TorchDispatchMode():
        assert torch._C._len_torch_dispatch_stack() == 1


@checks("torch._C._get_dispatch_mode")
def dispatch_mode() -> None:
    """It returns the mode of a key, if that is in force."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415

    with TorchDispatchMode():
        assert not _torch.makes_fake_tensors()
        with FakeTensorMode() as mode:
            assert torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is mode
            assert _torch.makes_fake_tensors()


@checks("torch._C._TorchDispatchModeKey.FAKE")
def fake_key() -> None:
    """It is the key of FakeTensorMode, and not of other modes."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    keys = torch._C._TorchDispatchModeKey
    with FakeTensorMode():
        assert torch._C._get_dispatch_mode(keys.FAKE) is not None
        assert torch._C._get_dispatch_mode(keys.PROXY) is None


@checks("torch._C._functorch.is_functorch_wrapped_tensor")
def functorch() -> None:
    """It recognizes the tensors that vmap, grad and jvp pass to a function."""
    seen: list[bool] = []

    def record(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.transformation_test()(x))
        return x.sum()

    torch.func.vmap(record)(torch.ones(2, 2))
    torch.func.grad(record)(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of torch.jit in forward mode
        torch.func.jvp(record, (torch.ones(2),), (torch.ones(2),))
    record(torch.ones(2))
    assert seen == [True, True, True, False]


@checks("torch._C.DisableTorchFunctionSubclass")
def disable_torch_function() -> None:
    """It keeps a subclass from handling torch's functions."""

    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    with torch._C.DisableTorchFunctionSubclass():
        tensor = torch.ones(2).as_subclass(Refuses)
    plain = _torch.without_class(tensor)
    assert type(plain) is torch.Tensor
    assert plain.tolist() == [1.0, 1.0]


@checks("torch._C._functionalization, torch._is_functional_tensor, Tensor._base")
def functionalization() -> None:
    """It keeps the views that a tensor was made by, as those of tensors on XLA devices were."""
    plain = torch.arange(6.0)
    torch._enable_functionalization(reapply_views=False)  # type: ignore[no-untyped-call,unused-ignore]
    try:
        row = torch._to_functional_tensor(plain)  # type: ignore[no-untyped-call,unused-ignore]
        shared = [row.expand(2, 6), row[:2].expand(3, 2).t(), row.expand(2, 6).detach()]
        shared += [row.as_strided((2, 2), (1, 1)), row.unfold(0, 3, 2)[0]]
        own = [row, row.expand(1, 6), row.reshape(2, 3).t(), row.expand(2, 6).clone()]
        assert [_torch.has_expanded_view(tensor) for tensor in shared] == [True] * 5
        assert [_torch.has_expanded_view(tensor) for tensor in own] == [False] * 4
    finally:
        torch._disable_functionalization()  # type: ignore[no-untyped-call,unused-ignore]
    assert not _torch.has_expanded_view(torch.ones(3))


@checks("torch.distributed._functional_collectives.AsyncCollectiveTensor.wait")
def functional_collective() -> None:
    """It is what a functional collective returns before it has ended."""
    with gloo_group():
        world: Any = dist.group.WORLD
        result = functional_collectives.all_reduce(torch.ones(2), "sum", world)
        pending = functional_collectives.AsyncCollectiveTensor(result)
        found = _torch.waited(pending)
    assert type(found) is torch.Tensor
    assert found.tolist() == [1.0, 1.0]
    assert _torch.waited(found) is found


@checks("torch._foreach_copy_")
def copies() -> None:
    """It copies many tensors."""
    flat = torch.zeros(6)
    views = [part.view(1, 3) for part in flat.split(3)]
    _torch.copy_each(views, [torch.ones(1, 3), torch.full((1, 3), 2.0)])
    assert flat.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


@checks("torch._utils._rebuild_sparse_tensor, torch.storage._load_from_bytes")
def rebuild_functions() -> None:
    """Pickles of sparse tensors and of storages refer to them; a renamed one would keep each received sparse tensor."""
    sparse = torch.eye(2).to_sparse()
    for value, (module, name) in (
        (sparse, _torch.REBUILD_SPARSE),
        (torch.ones(2).untyped_storage(), _torch.REBUILD_STORAGE),
    ):
        assert callable(getattr(importlib.import_module(module), name))
        assert f"{module}\n{name}".encode() in pickle.dumps(value, protocol=2)


@checks("torch._utils._rebuild_device_tensor_from_")
def rebuild_on_device() -> None:
    """Pickles of tensors without memory of their own, as those of XLA, refer to functions of these names."""
    module, prefix = _torch.REBUILD_ON_DEVICE
    assert [name for name in dir(importlib.import_module(module)) if name.startswith(prefix)]


@checks("GLOO_SOCKET_IFNAME in C's environment")
def gloo_interface() -> None:
    """Gloo reads it with C's getenv each time that a group is opened."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    with _torch.listening_on(loopback_interface()):
        assert getenv(b"GLOO_SOCKET_IFNAME") == getenv(b"NCCL_SOCKET_IFNAME") in {b"lo", b"lo0"}
        assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(os.environ)
        with gloo_group():
            dist.barrier()
    assert getenv(b"GLOO_SOCKET_IFNAME") is getenv(b"NCCL_SOCKET_IFNAME") is None
    os.putenv("GLOO_SOCKET_IFNAME", "none-of-this-name")
    try:
        with pytest.raises(RuntimeError, match="none-of-this-name"), gloo_group():
            pass
    finally:
        os.unsetenv("GLOO_SOCKET_IFNAME")


IMPORTS_THE_COMPILER = [name for name in CHECKED if "torch._dynamo" in name]


@pytest.mark.parametrize("name", variants(CHECKED, fast=CHECKED.keys() - IMPORTS_THE_COMPILER))
def test_a_private_name_is_there_and_does_what_is_relied_on(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else parts of torch set it when they are imported
    CHECKED[name]()


def test_every_private_name_of_the_module_has_a_check() -> None:
    tree = ast.parse(Path(_torch.__file__).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value
        for part in node.value.split(".")
    }
    imports = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    used |= {part for module in imports for part in module.split(".")}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private <= {part for name in CHECKED for part in re.split(r"[., ]+", name)}


# Where a name of torch begins, in imports and in attributes.
TORCH = re.compile(r"(torch|dist|distributed|distributed_c10d)(\.|$)")
PRIVATE = re.compile(r"\._[a-zA-Z]")


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names of torch in a file: imported, as attributes of its modules, and as text."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            names = [node.value]
        yield from (f"{path.name}: {name}" for name in names if TORCH.match(name) and PRIVATE.search(name))


def test_no_other_file_uses_a_private_name() -> None:
    package = Path(_torch.__file__).parent
    others = [path for path in package.rglob("*.py") if path.name not in {"_torch.py", "_torch_xla.py"}]
    assert [name for path in others for name in private_names(path)] == []
    assert len(list(private_names(Path(_torch.__file__)))) > 20
