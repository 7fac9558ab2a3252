"""Starting ranks, and reporting how they ended.

Users call `scripts`, `functions` and `many`. A launch is `options` and a target; `one_host` starts the fork server
(`forkserver`), `attempts` repeats an attempt, `supervisor` has the ranks of one (`rank_process`, `launched_rank`),
`report` says how they ended. `output` shows what ranks print; `other_hosts` is the watch over the other hosts of a
launch, `hosts` starts launchers there, over ssh or srun, and `engines` ranks by Slurm or Ray.
"""
