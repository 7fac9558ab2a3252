"""A launch on several hosts from one terminal, over ssh or srun.

`hosts_launch` is the terminal's side: a `connection` to each host, how it is started (`ssh_command`, `srun_command`),
which hosts meet (`rounds`), and the report. `launcher` is the other side: an ordinary launcher, whose console and
rendezvous are the terminal's (`relay`, `rendezvous`).
"""
