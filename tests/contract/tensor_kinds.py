"""Tensors and modules of every kind; each is made anew by a function."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

# Entered for the first time it sets a variable and makes a folder: before any test, for none may leave anything.
with FakeTensorMode():
    torch.ones(1)


# TorchScript parses source, which Python 3.11 cannot do in two threads at once (it does so for tracebacks, too), and
# ranks may be threads.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's: deprecated
    _SCRIPTED = torch.jit.script(torch.nn.Linear(2, 2)).save_to_buffer()


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls: type, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def made_in_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def compressed(convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: in beta state
        return convert(torch.eye(4))


def parameter(grad: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2, 2))
    if grad is not None:
        made.grad = grad(made.detach())
    return made


def lazy_module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.Linear(2, 2))


def frozen() -> torch.nn.Module:
    return torch.nn.Linear(2, 2).requires_grad_(requires_grad=False)


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: deprecated
        return torch.jit.load(io.BytesIO(_SCRIPTED), map_location="cpu")


def without_memory() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def inference_module() -> torch.nn.Module:
    with torch.inference_mode():
        return torch.nn.Linear(2, 2)


TENSORS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.ones(3),
    "0-d tensor": lambda: torch.tensor(0),
    "0-d bool tensor": lambda: torch.tensor(True),
    "0-d float tensor": lambda: torch.tensor(0.5),
    "1-element tensor": lambda: torch.tensor([0]),
    "empty tensor": lambda: torch.empty(0),
    "matrix of none": lambda: torch.empty(0, 3),
    "bool tensor": lambda: torch.tensor([True, False]),
    "int8 tensor": lambda: torch.ones(3, dtype=torch.int8),
    "uint64 tensor": lambda: torch.ones(3, dtype=torch.uint64),
    "float16 tensor": lambda: torch.ones(3, dtype=torch.float16),
    "float8 tensor": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "complex tensor": lambda: torch.ones(3, dtype=torch.complex64),
    "complex32 tensor": lambda: torch.ones(3, dtype=torch.complex32),
    "bits tensor": lambda: torch.ones(3, dtype=torch.uint8).view(torch.bits8),
    "float4 tensor": lambda: torch.ones(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "jagged tensor": lambda: nested(torch.jagged),
    "strided nested tensor": lambda: nested(torch.strided),
    "fake tensor": fake,
    "meta tensor": lambda: torch.ones(3, device="meta"),
    "COO tensor": lambda: torch.ones(3).to_sparse(),
    "CSR tensor": lambda: compressed(torch.Tensor.to_sparse_csr),
    "CSC tensor": lambda: compressed(torch.Tensor.to_sparse_csc),
    "BSR tensor": lambda: compressed(lambda one: one.to_sparse_bsr((2, 2))),
    "mkldnn tensor": lambda: torch.ones(3).to_mkldnn(),
    "quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
    "expanded tensor": lambda: torch.ones(1).expand(3),
    "inference tensor": made_in_inference,
    "lazy parameter": lambda: torch.nn.LazyLinear(3).weight,
    "lazy buffer": lambda: torch.nn.LazyBatchNorm1d().running_mean,
    "Tagged": lambda: torch.ones(3).as_subclass(Tagged),
    "Wrapper": lambda: Wrapper(torch.ones(3)),
    "parameter": parameter,
    "parameter and gradient": lambda: parameter(torch.ones_like),
    "result": lambda: torch.ones(3, requires_grad=True) * 2,
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.full((3,), 1j).conj().imag,
    "strided tensor": lambda: torch.ones(6)[::2],
    "overlapping tensor": lambda: torch.arange(4.0).as_strided((3, 2), (1, 1)),
    "tensor without memory": without_memory,
    "tensor class": lambda: torch.Tensor,
    "storage": lambda: torch.ones(3, device="cpu").untyped_storage(),  # those of XLA devices have no elements
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"),
    "torch.Generator": torch.Generator,
}

MODULES: dict[str, Callable[[], Any]] = {
    "module": lambda: torch.nn.Linear(2, 2),
    "module in inference": inference_module,
    "module without parameters": torch.nn.ReLU,
    "meta module": lambda: torch.nn.Linear(2, 2, device="meta"),
    "lazy module": lazy_module,
    "frozen module": frozen,
    "module class": lambda: torch.nn.Linear,
    "scripted module": scripted,
    "generator of parameters": lambda: torch.nn.Linear(2, 2).parameters(),
    "named parameters": lambda: torch.nn.Linear(2, 2).named_parameters(),
    "state dict": lambda: torch.nn.Linear(2, 2).state_dict(),
    "optimizer": lambda: torch.optim.SGD([parameter()], lr=0.1),
    "ParameterList": lambda: torch.nn.ParameterList([parameter(torch.ones_like)]),
    "parameter of bad gradient": lambda: [parameter(lambda one: one.to_sparse())],
    "parameter of expanded gradient": lambda: [parameter(lambda one: torch.ones(1).expand_as(one))],
}
