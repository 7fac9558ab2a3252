"""Functions of a training loop, made of collectives: `gradients` and `gradient_clipping`, `parameters`,
`synced_values`, `module_wrappers` (DDP and FSDP), `random_streams`, and `rank_control`, for what some ranks do alone.
Around the steps: `stopping`; `checkpoints`, made of `checkpoint_files` and a `folder_owner`; `metrics`; and
`rank_zero_output`.
"""
