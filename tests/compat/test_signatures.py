"""Every public name of the originals is there, with its parameters and their defaults."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys

import torch

from tests.tables import each_row

# As their documentation and code have them, without annotations.
SIGNATURES = {
    "virtex": {
        "launch": "(job_fn, num_machines=1, num_gpus_per_machine=1, machine_rank=0, "
        "dist_url='tcp://127.0.0.1:23456', args=())",
        "_job_worker": "(local_rank, job_fn, world_size, num_gpus_per_machine, machine_rank, dist_url, args)",
        "synchronize": "()",
        "get_world_size": "()",
        "get_rank": "()",
        "is_master_process": "()",
        "average_across_processes": "(t)",
        "gpu_mem_usage": "()",
    },
    "vis4d": {
        "get_world_size": "()",
        "get_rank": "()",
        "get_local_rank": "()",
        "distributed_available": "()",
        "synchronize": "()",
        "broadcast": "(obj, src=0)",
        "serialize_to_tensor": "(data)",
        "rank_zero_only": "(func)",
        "pad_to_largest_tensor": "(tensor)",
        "all_gather_object_gpu": "(data, rank_zero_return_only=True)",
        "create_tmpdir": "(rank, tmpdir=None, use_system_tmp=True)",
        "all_gather_object_cpu": "(data, tmpdir=None, rank_zero_return_only=True, use_system_tmp=False)",
        "reduce_mean": "(tensor)",
        "obj2tensor": "(pyobj, device=device(type='cuda'))",
        "tensor2obj": "(tensor)",
        "all_reduce_dict": "(py_dict, reduce_op='sum', to_float=True)",
        "is_module_wrapper": "(module)",
    },
    "mmcv": {
        "init_dist": "(launcher, backend='nccl', **kwargs)",
        "_init_dist_pytorch": "(backend, **kwargs)",
        "_init_dist_mpi": "(backend, **kwargs)",
        "_init_dist_slurm": "(backend, port=None)",
        "get_dist_info": "()",
        "master_only": "(func)",
        "allreduce_params": "(params, coalesce=True, bucket_size_mb=-1)",
        "allreduce_grads": "(params, coalesce=True, bucket_size_mb=-1)",
        "_allreduce_coalesced": "(tensors, world_size, bucket_size_mb=-1)",
    },
    "torch_launch": {"parse_args": "()", "main": "()"},
}
PAIRS = [(module, name) for module, names in SIGNATURES.items() for name in names]
# A function is Local if it does not communicate; the docstring states which of the two it is.
LOCAL_OR_COLLECTIVE = re.compile(r"^\s*(Local|Collective)\b|\. (Local|Collective)\b", re.MULTILINE)


@each_row(("module", "name"), PAIRS)
def test_a_name_has_the_originals_signature(module: str, name: str) -> None:
    function = getattr(importlib.import_module(f"rankwise.compat.{module}"), name)
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[module][name]
    assert LOCAL_OR_COLLECTIVE.search(function.__doc__ or ""), "as every public function does"
    if (module, name) == ("vis4d", "obj2tensor"):
        assert signature.parameters["device"].default == torch.device("cuda")


def test_a_user_of_rankwise_does_not_load_them() -> None:
    """They are over the core, which knows nothing of them."""
    program = (
        "import rankwise as rw, sys\n"
        "[getattr(rw, name) for name in rw.__all__]\n"
        "sys.exit(any(name.startswith('rankwise.compat') for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=200).returncode == 0
