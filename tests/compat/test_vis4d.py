"""The names of vis4d's module: one source for rank and size, values and tensors that arrive as they were."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankwise as rw
from rankwise._comm.group import Group
from rankwise._session.current import reset_current
from rankwise.compat import vis4d
from tests.compat.adapted import PROGRAMS
from tests.session.worlds import clean_environ
from tests.tables import each_row

RECORDS = Path(__file__).parents[1] / "data"


@pytest.mark.ranks("serial", 2, 4)
def test_ranks_know_themselves(comm: Group) -> None:
    assert (vis4d.get_rank(), vis4d.get_world_size(), vis4d.get_local_rank()) == (comm.rank, comm.size, comm.rank)
    assert vis4d.distributed_available() == dist.is_initialized() == (comm.size > 1)
    vis4d.synchronize()


@pytest.mark.parametrize(
    ("record", "sizes"),
    [
        ("slurm/20-sbatch-batch-shell", {1}),  # the original returns 4, for SLURM_NTASKS is the job's
        ("slurm/52-salloc-N2-n4-shell", {1}),
        ("slurm/54-srun-pty-n1-bash", {1}),
        ("slurm/53-srun-pty", {4}),
        ("slurm/51-salloc-srun", {4}),
    ],
)
def test_the_shell_of_a_job_is_alone(record: str, sizes: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The original goes by the job's name, which is "bash" for some shells and not for others."""
    found: dict[str, dict[str, str]] = json.loads((RECORDS / f"{record}.json").read_text())
    ranks = list(found.values())
    seen = []
    for rank in ranks:
        with monkeypatch.context() as patch:
            for name, value in rank.items():
                patch.setenv(name, value)
            reset_current()
            seen.append((vis4d.get_rank(), vis4d.get_world_size()))
    assert {size for _, size in seen} == sizes
    assert [rank for rank, _ in seen] == list(range(len(ranks)))


def test_a_local_rank_that_nobody_knows_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    reset_current()
    assert (vis4d.get_rank(), vis4d.get_world_size()) == (3, 4)
    with pytest.raises(rw.NotJoinedError, match="local_rank cannot be known"):
        vis4d.get_local_rank()


def test_ranks_that_have_not_joined_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original finds a world of four in the environment, and has no process group."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    reset_current()
    for gather in (vis4d.all_gather_object_gpu, vis4d.all_gather_object_cpu):
        with pytest.raises(rw.NotJoinedError, match=r"rank 0 .* of 4"):
            gather("data")
    assert not vis4d.distributed_available()
    vis4d.synchronize()
    assert vis4d.broadcast("mine") == "mine"


def test_garbage_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "4")
    reset_current()
    with pytest.raises(rw.LauncherEnvironmentError, match="RANK='first' is not a whole number"):
        vis4d.get_rank()


@pytest.mark.ranks("serial", 2, 4)
def test_broadcast_gives_any_value_to_all(comm: Group) -> None:
    last = comm.size - 1
    value = {"boxes": torch.arange(3), "name": "héllo"} if vis4d.get_rank() == last else None
    received = vis4d.broadcast(value, src=last)
    assert received["boxes"].tolist() == [0, 1, 2]
    assert received["name"] == "héllo"
    assert (received is value) == (vis4d.get_rank() == last), "the sender keeps its own"


@pytest.mark.ranks("serial", 2, 4)
def test_rank_zero_only_runs_on_rank_zero_only(comm: Group) -> None:
    @vis4d.rank_zero_only
    def save(path: str) -> str:
        return path

    assert save("model.pt") == ("model.pt" if comm.rank == 0 else None)
    assert save.__name__ == "save"


@pytest.mark.ranks("serial", 2, 4)
def test_values_become_tensors_and_values_again(comm: Group) -> None:
    value = {"rank": vis4d.get_rank(), "boxes": [1.5] * 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the original's storages are deprecated
        assert vis4d.tensor2obj(vis4d.obj2tensor(value)) == value, "CUDA by default, or not"
        if comm.size == 1:
            with pytest.raises(rw.NotJoinedError, match="serialize_to_tensor is for ranks that have joined"):
                vis4d.serialize_to_tensor(value)
            return
        tensor = vis4d.serialize_to_tensor(value)
    assert (tensor.dtype, tensor.device.type, tensor.dim()) == (torch.uint8, "cpu", 1)
    assert pickle.loads(tensor.numpy().tobytes()) == vis4d.tensor2obj(tensor) == value
    assert tensor.numpy().flags.writeable


@pytest.fixture
def group_of() -> Iterator[None]:
    """Close the group that is opened here, and restore the state that torch changed."""
    hook = sys.excepthook
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None])
def test_backends_may_be_written_in_any_way(backend: str | None, group_of: None) -> None:
    """To the original only "gloo" and "nccl" are backends, and torch calls others "undefined"."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert vis4d.tensor2obj(vis4d.serialize_to_tensor([1, 2])) == [1, 2]


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy", "cuda:nccl-legacy"])
def test_each_implementation_of_nccl_is_known(backend: str, group_of: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.14 and newer have several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(rw, "backend", lambda: backend)
    assert vis4d.tensor2obj(vis4d.serialize_to_tensor([1, 2])) == [1, 2]


def test_a_backend_that_is_not_known_is_an_assertion_error_too(group_of: None) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with pytest.raises(AssertionError, match="is none of gloo") as caught:
        vis4d.serialize_to_tensor("data")
    assert isinstance(caught.value, rw.InvalidArgumentError)


@pytest.mark.ranks("serial", 2, 4)
@each_row("dtype", [torch.uint8, torch.float32], collective=True)
def test_tensors_are_padded_to_the_largest(comm: Group, dtype: torch.dtype) -> None:
    tensor = torch.ones(2 * vis4d.get_rank() + 1, dtype=dtype)
    if comm.size == 1:
        with pytest.raises(rw.NotJoinedError, match="pad_to_largest_tensor is for ranks"):
            vis4d.pad_to_largest_tensor(tensor)
        return
    sizes, padded = vis4d.pad_to_largest_tensor(tensor)
    assert sizes == [2 * rank + 1 for rank in range(comm.size)]
    assert padded.dtype == dtype
    assert padded.tolist() == [1] * len(tensor) + [0] * (max(sizes) - len(tensor))


@pytest.mark.ranks(2)
def test_what_cannot_be_padded_is_refused_on_all_ranks(comm: Group) -> None:
    matrix = torch.ones(2, 2)
    assert vis4d.pad_to_largest_tensor(matrix) == ([4, 4], matrix), "as large as all: itself, as in the original"
    with pytest.raises(rw.InvalidArgumentError, match=r"rank 1 has the shape \[2, 2\].* 5 elements"):
        vis4d.pad_to_largest_tensor(matrix if vis4d.get_rank() else torch.ones(5))
    with pytest.raises(rw.RemoteRankError if vis4d.get_rank() else rw.PayloadTypeError, match="takes a tensor, got"):
        vis4d.pad_to_largest_tensor(matrix if vis4d.get_rank() else 3)  # type: ignore[arg-type]  # the mistake
    assert rw.all_reduce(1) == 2


@pytest.mark.ranks("serial", 2, 4)
@each_row("everywhere", [False, True], collective=True)
def test_objects_are_gathered_in_order(comm: Group, everywhere: bool) -> None:
    value = {"rank": vis4d.get_rank(), "boxes": torch.ones(vis4d.get_rank() * 1000)}
    gathered = vis4d.all_gather_object_gpu(value, rank_zero_return_only=not everywhere)
    if comm.rank and not everywhere:
        assert gathered is None
        return
    assert gathered is not None
    assert [(part["rank"], len(part["boxes"])) for part in gathered] == [
        (rank, rank * 1000) for rank in range(comm.size)
    ]


@pytest.mark.ranks(2)
def test_reduce_mean_of_ranks_that_differ_in_strides_and_gradients(comm: Group) -> None:
    tensor = torch.ones(2, 4) if comm.rank else torch.full((4, 2), 3.0, requires_grad=True).t()
    mean = vis4d.reduce_mean(tensor)
    assert torch.equal(mean, torch.full((2, 4), 2.0))
    assert (mean.stride(), mean.requires_grad) == (tensor.stride(), tensor.requires_grad)


@pytest.mark.ranks("serial", 2, 4)
def test_reduce_mean_of_any_type_is_new(comm: Group) -> None:
    """Integers make the original raise, and two float16 of 40000 make it overflow when they are summed."""
    for tensor, wanted in (
        (torch.tensor([1.0, float(vis4d.get_rank())]), [1.0, (comm.size - 1) / 2]),
        (torch.tensor([vis4d.get_rank()]), [(comm.size - 1) / 2]),
        (torch.tensor([40000.0], dtype=torch.float16), [40000.0]),
    ):
        before = tensor.tolist()
        result = vis4d.reduce_mean(tensor)
        assert result.tolist() == wanted
        assert tensor.tolist() == before
        assert (result is tensor) == (comm.size == 1)


@pytest.mark.ranks(2)
def test_reductions_keep_the_strides_and_gradients_of_the_originals(comm: Group) -> None:
    rank = vis4d.get_rank()
    image = torch.full((1, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)
    mean = vis4d.reduce_mean(image)
    assert (mean.stride(), mean.unique().tolist()) == (image.stride(), [0.5])
    weight = torch.full((2,), float(rank), requires_grad=True)
    for reduced, grad in (
        (vis4d.reduce_mean(weight), 0.5),
        (vis4d.all_reduce_dict({"loss": weight}, "mean")["loss"], 0.5),
        (vis4d.all_reduce_dict({"loss": weight})["loss"], 1.0),
    ):
        assert reduced.tolist() == [grad] * 2, "0.5 is the mean, and 1 the sum"
        weight.grad = None
        reduced.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [grad] * 2
    assert not vis4d.all_reduce_dict({"loss": weight}, "max")["loss"].requires_grad


@pytest.mark.ranks("serial", 2, 4)
def test_all_reduce_dict_matches_keys_in_any_order(comm: Group) -> None:
    """The original broadcasts keys of different lengths, and sums one thing with another."""
    rank = vis4d.get_rank()
    values = {"a": torch.tensor([1.0, float(rank)]), "a longer name": torch.full((2, 2), 10.0)}
    mine = OrderedDict(reversed(values.items())) if rank % 2 else values
    total = vis4d.all_reduce_dict(mine)
    assert total["a"].tolist() == [comm.size, sum(range(comm.size))]
    assert total["a longer name"].tolist() == [[10.0 * comm.size] * 2] * 2
    assert list(total) == list(mine)
    assert (total is mine) == (comm.size == 1)
    assert type(total) is type(mine)


@pytest.mark.ranks("serial", 2, 4)
def test_all_reduce_dict_does_what_its_op_says(comm: Group) -> None:
    """Whatever is not "mean" is a sum to the original."""
    value = {"x": torch.tensor(float(vis4d.get_rank()))}
    last = comm.size - 1
    for op, wanted in (("max", last), ("min", 0), ("mean", last / 2), ("sum", sum(range(comm.size)))):
        assert vis4d.all_reduce_dict(value, reduce_op=op)["x"].item() == wanted
    with pytest.raises(rw.InvalidArgumentError, match="average"):
        vis4d.all_reduce_dict(value, reduce_op="average")


@pytest.mark.ranks(2, 4)
def test_all_reduce_dict_is_exact(comm: Group) -> None:
    """Through float32 the original loses integers beyond 2**24, and most of a float64."""
    big, fine = 2**40 + 1, 1.0 + 2.0**-40
    values = {"big": torch.tensor(big), "fine": torch.tensor(fine, dtype=torch.float64), "half": torch.ones(1).half()}
    floats = vis4d.all_reduce_dict(values)
    assert floats["big"].item() == big * comm.size
    assert floats["fine"].item() == fine * comm.size
    assert [floats[key].dtype for key in values] == [torch.float64, torch.float64, torch.float32]
    kept = vis4d.all_reduce_dict(values, to_float=False)
    assert [kept[key].dtype for key in values] == [torch.int64, torch.float64, torch.float16]
    assert kept["big"].item() == big * comm.size


@pytest.mark.ranks(2, 4)
def test_all_reduce_dict_tells_ranks_that_differ(comm: Group) -> None:
    rank = vis4d.get_rank()
    with pytest.raises(rw.MismatchError):
        vis4d.all_reduce_dict({"loss" if rank else "score": torch.ones(1)})
    with pytest.raises(rw.MismatchError):
        vis4d.all_reduce_dict({"loss": torch.ones(1)}, reduce_op="mean" if rank else "sum")
    with pytest.raises(rw.RemoteRankError if rank else rw.PayloadTypeError, match="got a number for 'loss'"):
        vis4d.all_reduce_dict({"loss": torch.ones(1) if rank else 1.0})  # type: ignore[dict-item]  # the mistake
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks("serial", 2, 4)
def test_modules_that_wrap_others_are_known(comm: Group) -> None:
    model = nn.Identity()
    assert not vis4d.is_module_wrapper(nn.Sequential(model))
    assert vis4d.is_module_wrapper(nn.Sequential(nn.DataParallel(model)))


@pytest.mark.slow
def test_wrappers_of_torchs_are_known(tmp_path: Path) -> None:
    """DDP, and the wrappers that the original misses: FSDP 1 and 2, and the result of torch.compile."""
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("rankwise")), "launch", "-n", "2", str(PROGRAMS / "wrappers.py")],
        env=clean_environ(TMPDIR=str(tmp_path)), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] True True True True" for rank in range(2)]


def test_a_deepspeed_engine_is_a_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of DeepSpeed, which needs a GPU, a module of its name."""
    engine = type("DeepSpeedEngine", (nn.Module,), {})
    monkeypatch.setitem(sys.modules, "deepspeed", type("deepspeed", (), {"DeepSpeedEngine": engine}))
    assert vis4d.is_module_wrapper(engine())
    assert not vis4d.is_module_wrapper(nn.Identity())
