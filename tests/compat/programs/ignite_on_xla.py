"""The XLA model of the drop-in, with the fake torch_xla of tests/xla: alone, and in ranks that are threads."""

import sys
import warnings

import torch
import torch_xla
from torch_xla import _XLAC
from torch_xla._internal import pjrt

import rankwise.compat.ignite as idist
from rankwise.compat.ignite import auto, utils
from rankwise.compat.ignite.comp_models.xla import _XlaDistModel


def alone() -> None:
    """Check the model on one device, which stands for the CPU: there are no tensors on the fake's."""
    torch_xla.device = lambda: torch.device("cpu")
    assert idist.has_xla_support
    assert idist.available_backends()[-1] == "xla-tpu"
    assert _XlaDistModel in idist.registered_computation_models
    assert (idist.model_name(), idist.backend(), idist.get_rank(), idist.get_world_size()) == (
        "xla-dist",
        "xla-tpu",
        0,
        1,
    )
    assert type(utils._model) is _XlaDistModel
    assert idist.device() == torch.device("cpu")
    assert idist.all_gather(torch.tensor(3)).tolist() == [3], "as in a world of one"
    assert auto._MpDeviceLoader.__name__ == "MpDeviceLoader"


def train() -> None:
    """Check the model, the optimizer and the data loader."""
    model = torch.nn.Linear(1, 1)
    assert idist.auto_model(model, sync_bn=True) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces `step` of the object
    adapted = idist.auto_optim(optimizer)
    assert isinstance(adapted, torch.optim.SGD)
    assert isinstance(adapted, auto._XLADistributedOptimizer)
    assert adapted.wrapped_optimizer is optimizer
    with torch.no_grad():
        model.weight.fill_(0.0)
    model(torch.ones(1)).backward()
    adapted.step()
    assert model.weight.item() == -1.0
    assert _XLAC.calls == ["sync"]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = idist.auto_dataloader([1, 2], pin_memory=True)  # type: ignore[arg-type]  # any sequence
    assert ["Found incompatible options: xla support and pin_memory" in str(one.message) for one in caught] == [True]
    assert not loader.pin_memory


def join() -> None:
    """Check a world of one."""
    idist.initialize("xla-tpu")
    assert (idist.model_name(), idist.backend(), idist.get_local_rank(), idist.get_nnodes()) == (
        *("xla-dist", "xla-tpu"),
        *(0, 1),
    )
    assert idist.all_reduce(5, op="MAX") == 5
    idist.finalize()

    idist.initialize("gloo")
    assert (idist.model_name(), idist.backend()) == ("native-dist", "gloo")
    optimizer = torch.optim.SGD([torch.ones(1)])
    assert idist.auto_optim(optimizer) is optimizer
    idist.finalize()


def rank() -> None:
    """Check a rank that calls no `initialize`, and then one that does."""
    number, size = idist.get_rank(), idist.get_world_size()
    assert (number, size) == (_XLAC.state.ordinal, 2)
    assert (idist.get_local_rank(), idist.get_nproc_per_node(), idist.get_nnodes()) == (number, 2, 1)
    assert (idist.model_name(), idist.backend(), idist.device().index) == ("xla-dist", "xla-tpu", number)
    assert idist.all_gather(number) == [0, 1], "the first collective joins"
    assert idist.all_reduce(torch.tensor([number]), group=[1]).tolist() == [number]
    assert utils._rank_not_in_group([1]) == (number == 0)
    idist.barrier()
    idist.finalize()
    idist.initialize("xla-tpu", timeout=100)
    try:
        idist.initialize("xla-tpu")
    except RuntimeError as error:
        assert "already initialized" in str(error)  # noqa: PT017 - this is a program
    assert idist.all_reduce(1) == 2
    idist.barrier()
    idist.finalize()


if sys.argv[1] == "alone":
    alone()
    train()
    join()
else:
    pjrt._run_thread_per_device(0, 1, rank, pjrt.initialize_multiprocess)
print("ok")
