"""Variables set too late by a script: torch reads them when it is imported, in a forked rank before the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

_THREADS: Final = "OMP_NUM_THREADS"
# What torch 2.13 reads as it is imported, of what scripts set. Of the allocator, that is the choice of a backend alone.
_OF_IMPORT: Final = (
    *("TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE", "TORCH_COMPILE_DEBUG", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_CUDA_SANITIZER"),
    *("TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "PYTORCH_JIT", "OMP_PROC_BIND"),
    *("OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY"),
)
_OF_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def late_setting_warning(initial: Mapping[str, str], final: Mapping[str, str]) -> str:
    """Return a warning if a script has set variables of torch without effect; "" if it has not.

    Args:
        initial: The environment at the start of the script.
        final: The environment at its end.
    """
    late = [name for name in _OF_IMPORT if initial.get(name) != final.get(name)]
    late += [name for name in _OF_ALLOCATOR if _allocator(initial.get(name, "")) != _allocator(final.get(name, ""))]
    text = _threads_warning(initial.get(_THREADS, ""), final.get(_THREADS, ""))
    if late:
        text += (
            f"rankwise: the script has set {', '.join(late)} after torch was loaded, too late: "
            "set it before `rankwise launch`, or start with --no-preload\n"
        )
    return text


def _allocator(value: str) -> str:
    """Return the backend that a configuration of the allocator chooses."""
    return next((part for part in value.split(",") if part.startswith("backend:")), "")


def _threads_warning(before: str, after: str) -> str:
    if before == after or not (before.isdecimal() and after.isdecimal()):
        return ""
    number = sys.modules["torch"].get_num_threads()
    if number == int(after) or number != min(int(before), os.cpu_count() or 1):
        return ""  # the script has called torch.set_num_threads as well
    return (
        f"rankwise: the script has set {_THREADS}={after} after torch was loaded, too late: it ran with {number}; "
        f"set it before `rankwise launch`, call torch.set_num_threads({after}), or start with --no-preload\n"
    )
