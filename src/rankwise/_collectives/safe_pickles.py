"""Pickles that are read with `safe=True`: of builtin values, tensors, arrays and registered types.

A received pickle may have been made to run code. So it is inspected first: Python's own unpickler runs it with
placeholders for all that it refers to, so that nothing is imported, called or made. An unpickler that knows the same
definitions, and imports none, makes the value. Both run the same steps, since pickles have no branches.
"""

from __future__ import annotations

import pickle
import sys
from itertools import repeat
from typing import Any, Final

import torch

from rankwise._collectives.out_of_band import (
    Pickled,
    Stream,
    ValuePickler,
    ValueUnpickler,
    out_of_band_array,
    set_attributes,
)
from rankwise._collectives.safe_types import (
    Placeholder,
    described_dtype,
    has_references,
    make_array_scalar,
    make_dtype,
    make_object_array,
    make_parameter,
    safe_definition,
    safe_definition_of_main,
    without_references,
)
from rankwise._restricted_pickles import plain_loads, refuse_extensions

# The function by which pickles refer to definitions of `__main__`, by name and fingerprint.
_OF_MAIN: Final = ("rankwise._pickling", "_named")


class RefusedError(pickle.UnpicklingError):
    """A pickle refers to a definition that is neither safe nor registered.

    Attributes:
        module: Its module.
        name: Its name there.
    """

    def __init__(self, module: str, name: str) -> None:
        super().__init__(f"{module}.{name}")
        self.module = module
        self.name = name


class SafePickler(ValuePickler):
    """A pickler that brings parameters and arrays into forms that `SafeUnpickler` reads."""

    def __init__(self, file: Pickled) -> None:
        super().__init__(file)
        self._numpy: Any = sys.modules.get("numpy")

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any value of the user's
        if type(value) is torch.nn.Parameter:
            reduced = make_parameter, (value.detach(), value.requires_grad)
            return (*reduced, value.__dict__, None, None, set_attributes) if value.__dict__ else reduced
        if self._numpy is not None:
            reduced = self._of_numpy(value)
            if reduced is not None:
                return reduced
        return super().reducer_override(value)

    def _of_numpy(self, value: Any) -> Any:  # noqa: ANN401 - any value of the user's
        """Return the reduction of a dtype, scalar or array; None for other values, and those that have none."""
        numpy = self._numpy
        if isinstance(value, numpy.dtype):
            description = described_dtype(value)
            return None if description is None else (make_dtype, (description,))
        if type(value) is numpy.ndarray and value.dtype == object:
            return make_object_array, (value.shape, value.ravel().tolist())
        if not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
            return None
        if has_references(value.dtype) or described_dtype(value.dtype) is None:
            return None
        if isinstance(value, numpy.generic) or value.dtype.itemsize == 0:
            return make_array_scalar, (value.dtype, value.tobytes())
        contents = value.ravel().view("u1")
        self.contents.append(("cpu", contents, contents.nbytes))
        return out_of_band_array, (len(self.contents) - 1, value.dtype, value.shape)


class SafeUnpickler(ValueUnpickler):
    """An unpickler that knows safe and registered definitions alone."""

    read_table = staticmethod(plain_loads)

    def find_other(self, module: str, name: str) -> Any:  # noqa: ANN401 - any definition
        if (module, name) == _OF_MAIN:
            return _class_of_main
        found = safe_definition(module, name)
        if found is None:
            raise RefusedError(module, name)
        return found.value

    def make_array(self, index: int, dtype: Any, shape: Any) -> Any:  # noqa: ANN401 - numpy's
        return super().make_array(index, without_references(dtype), shape)


def inspect(stream: memoryview | bytes) -> None:
    """Check a pickle, without making anything of it.

    Raises:
        RefusedError: It refers to a definition that is neither safe nor registered.
        Exception: It has steps that no pickle of safe values has.
    """
    refuse_extensions(stream)
    _Inspector(Stream(stream), buffers=repeat(memoryview(b""))).load()  # type: ignore[arg-type]  # all it needs


class _Inspector(pickle.Unpickler):
    """An unpickler with placeholders for all definitions."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - any placeholder
        if (module, name) == _OF_MAIN:
            return _ClassOfMain()
        found = safe_definition(module, name)
        if found is None:
            raise RefusedError(module, name)
        return found.placeholder


class _ClassOfMain(Placeholder):
    """Stands for the function that returns a registered class of `__main__`."""

    __slots__ = ()

    def __call__(self, name: str, fingerprint: str) -> Any:  # noqa: ANN401 - any placeholder
        found = safe_definition_of_main(name, fingerprint)
        if found is None:
            raise RefusedError("__main__", name)
        return found.placeholder


def _class_of_main(name: str, fingerprint: str) -> Any:  # noqa: ANN401 - any class
    found = safe_definition_of_main(name, fingerprint)
    if found is None:
        raise RefusedError("__main__", name)
    return found.value
