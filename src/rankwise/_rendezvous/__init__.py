"""How ranks find each other, before there is a process group.

`endpoint` is where they meet; `handshake` and `rank_zero` how, without a store; `store` how, over one; `membership`
what they say, and whether they form one world; `readiness` the last barrier. `mpi` asks MPI for the address. The
launchers of several hosts meet by `elastic`, `static_rendezvous` and `c10d_endpoint`; `nodes` describes these hosts.
"""
