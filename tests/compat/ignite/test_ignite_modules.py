"""The modules of ignite.distributed, and the names in them that its tests and type hints use."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
import rankwise.compat.ignite as idist
from rankwise.compat.ignite import utils
from rankwise.compat.ignite.comp_models import native
from rankwise.compat.ignite.comp_models.base import ComputationModel, _SerialModel
from rankwise.compat.ignite.comp_models.horovod import _HorovodDistModel
from rankwise.compat.ignite.comp_models.native import _NativeDistModel
from rankwise.compat.ignite.comp_models.xla import _XlaDistModel
from tests.compat.ignite.original import original, without_useless
from tests.lanes import variants
from tests.session.worlds import clean_environ
from tests.tables import each_row
from tests.xla.fake_devices import FAKE

MODULES = (
    "",
    ".auto",
    ".comp_models",
    ".comp_models.base",
    ".comp_models.horovod",
    ".comp_models.native",
    ".comp_models.xla",
    ".launcher",
    ".utils",
)
# Functions that pack types, shapes and texts into tensors for one of Ignite's transports.
TRANSPORT = {
    "_apply_op",
    "_collective_op",
    "_collective_op_dtype",
    "_compute_nproc_per_node",
    "_decode_as_placeholder",
    "_decode_str",
    "_encode_input_data",
    "_encode_str",
    "_ext_local_rank",
    "_setup_attrs",
    "_setup_placeholder",
}


@each_row("name", MODULES)
def test_every_name_that_a_module_defines_is_there(name: str) -> None:
    theirs = importlib.import_module(f"ignite.distributed{name}")
    ours = importlib.import_module(f"rankwise.compat.ignite{name}")
    defined = {
        public
        for public, value in vars(theirs).items()
        if not public.startswith("__")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", theirs.__name__).startswith("ignite.distributed")
    }
    assert not {public for public in defined - {"TYPE_CHECKING"} if not hasattr(ours, public)}


def test_models_have_the_names_of_ignites() -> None:
    base = importlib.import_module("ignite.distributed.comp_models.base")
    for theirs, ours in ((base.ComputationModel, ComputationModel), (base._SerialModel, _SerialModel)):
        names = {name for name in vars(theirs) if not name.startswith("__") and name != "_abc_impl"}
        assert {name for name in names if not hasattr(ours, name)} <= TRANSPORT
    assert idist.registered_computation_models == (_SerialModel, _NativeDistModel)
    assert [without_useless(model.available_backends) for model in original.registered_computation_models] == [
        model.available_backends for model in idist.registered_computation_models
    ]


def test_a_process_alone_has_the_serial_model() -> None:
    assert type(utils._model) is _SerialModel
    model = utils._model
    assert (model.get_rank(), model.get_world_size(), model.get_local_rank()) == (0, 1, 0)
    assert (model.get_nnodes(), model.get_node_rank(), model.get_nproc_per_node()) == (1, 0, 1)
    assert model.backend() is None
    assert (model.all_reduce(3), model.all_gather(3), model.broadcast(3), model._get_max_length("é", "cpu")) == (
        3,
        [3],
        3,
        1,
    )
    assert model._init_method is None
    model.barrier()
    model.finalize()
    assert isinstance(_SerialModel.create_from_context(), _SerialModel)
    assert isinstance(_SerialModel.create_from_backend("any"), _SerialModel)
    assert _NativeDistModel.create_from_context() is None
    assert _XlaDistModel.create_from_context() is None
    assert _HorovodDistModel.create_from_context() is None
    assert utils._need_to_sync
    assert not utils._rank_not_in_group([1]), "as in the original"
    with pytest.raises(NotImplementedError, match="does not implement spawn"):
        _SerialModel.spawn()
    with pytest.raises(AttributeError, match="nothing"):
        utils.nothing  # noqa: B018 - that is the point


def test_setting_a_model_changes_nothing() -> None:
    utils._set_model(_SerialModel())
    utils._set_model(_NativeDistModel(), temporary=True)
    assert idist.model_name() == "serial"
    with pytest.raises(TypeError, match="not a computation model"):
        utils._set_model("native-dist")  # type: ignore[arg-type]


def test_a_model_joins_and_leaves() -> None:
    model = _NativeDistModel.create_from_backend("gloo", timeout=30)
    assert isinstance(model, _NativeDistModel)
    assert dist.get_backend() == "gloo"
    assert (idist.model_name(), idist.backend(), model._init_method) == ("native-dist", "gloo", "env://")
    assert type(utils._model) is _NativeDistModel
    assert isinstance(_NativeDistModel.create_from_context(), _NativeDistModel)
    with pytest.raises(RuntimeError, match="Can not create new distributed process group if default one is"):
        _NativeDistModel.create_from_backend("gloo")
    with pytest.raises(ValueError, match="trying to initialize the default process group twice!"):
        idist.initialize("gloo")
    model.finalize()
    assert not dist.is_initialized()
    assert idist.model_name() == "serial"


def test_the_init_method_is_that_of_the_user(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/shared"
    idist.initialize("gloo", init_method=method, rank=0, world_size=1)
    assert utils._model._init_method == method
    idist.finalize()
    idist.initialize("gloo")
    assert utils._model._init_method == "env://"
    idist.finalize()


def test_models_refuse_the_backends_of_others() -> None:
    for model in (_NativeDistModel, _XlaDistModel):
        for backend in ("abc", "horovod", None, 3):
            with pytest.raises(ValueError, match="Backend should be one of"):
                model.create_from_backend(backend or "none")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="Backend should be one of"):
                model.spawn(print, (), backend=backend or "none")
    with pytest.raises(ValueError, match="Backend should be one of"):
        _XlaDistModel.create_from_backend("gloo")
    for arguments in ({"rank": 0}, {"world_size": 1}):
        with pytest.raises(ValueError, match="Arguments rank and world_size should be None"):
            idist.initialize("gloo", **arguments)
        with pytest.raises(ValueError, match="Both rank and world_size should be provided"):
            idist.initialize("gloo", init_method="env://", **arguments)


def test_horovod_is_an_error_that_names_the_replacement(tmp_path: Path) -> None:
    assert not idist.has_hvd_support
    replacement = r"Horovod is not supported: use 'nccl' on GPUs or 'gloo' on CPUs .* in place of horovodrun"
    for call in (
        lambda: idist.initialize("horovod"),
        lambda: idist.spawn("horovod", print, ()),
        lambda: idist.Parallel(backend="horovod"),
        lambda: utils._assert_backend("horovod"),
        lambda: _HorovodDistModel.create_from_backend("horovod"),
        lambda: _HorovodDistModel.spawn(print, ()),
    ):
        with pytest.raises(ValueError, match=replacement):
            call()


def test_slurm_is_read_by_rankwise() -> None:
    assert native._expand_hostlist("node[18-19,1-2]") == ["node18", "node19", "node1", "node2"], "Slurm's order"
    with pytest.raises(ValueError, match="hostlist invalid"):
        native._expand_hostlist("invalid[]")
    step = {
        "SLURM_JOB_ID": "12345",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "c1",
        "SLURM_JOB_NODELIST": "c1",
        "SLURM_JOB_NUM_NODES": "1",
    }
    variables = native._setup_ddp_vars_from_slurm_env(step)
    assert [variables[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")] == [1, 1, 2, "c1"]


@pytest.mark.ranks(2)
def test_the_model_is_the_view_of_the_session(session: rw.Session) -> None:
    assert type(utils._model) is _NativeDistModel
    model = utils._model
    assert (model.get_rank(), model.get_world_size(), model.backend()) == (session.rank, 2, "gloo")
    assert model.device() == torch.device("cpu")
    assert model.all_reduce(session.rank, "MAX") == 1
    assert model._get_max_length("x" * (session.rank + 2), "cpu") == 3
    group = model.new_group([1])
    assert utils._rank_not_in_group(group) == utils._rank_not_in_group([1]) == (session.rank == 0)
    assert not utils._rank_not_in_group(None)
    with pytest.raises(ValueError, match="Argument group should be list of int"):
        utils._rank_not_in_group("abc")


@pytest.mark.slow
def test_spawned_ranks_know_the_init_method(tmp_path: Path) -> None:
    def check(local_rank: int, expected: str) -> None:
        assert type(utils._model) is _NativeDistModel
        assert utils._model._init_method == expected

    idist.spawn("gloo", check, ("env://",), nproc_per_node=2)
    method = f"file://{tmp_path}/shared"
    _NativeDistModel.spawn(check, (method,), nproc_per_node=1, init_method=method)


@pytest.mark.slow
def test_importing_the_modules_does_not_import_torch_xla(tmp_path: Path) -> None:
    (tmp_path / "torch_xla.py").write_text("raise RuntimeError('imported')")
    program = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}:\n"
        "    importlib.import_module('rankwise.compat.ignite' + name)\n"
        "from rankwise.compat.ignite.comp_models import has_xla_support, xla\n"
        "assert has_xla_support and xla._XlaDistModel.available_backends == ('xla-tpu',)\n"
        "assert 'torch_xla' not in sys.modules\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("world", "devices"), variants([("alone", 1), ("ranks", 2)], slow=[("ranks", 2)]))
def test_the_xla_model(world: str, devices: int, tmp_path: Path) -> None:
    """tests/xla/lane has its tests on devices."""
    program = Path(__file__).parents[1] / "programs" / "ignite_on_xla.py"
    ended = subprocess.run(
        [sys.executable, str(program), world],
        env=clean_environ(TMPDIR=str(tmp_path), PYTHONPATH=FAKE, PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices)),
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["ok"]), ended.stderr
    assert ("sync_bn is ignored" in ended.stderr) == (world == "alone")
