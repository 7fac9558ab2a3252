"""The data planes, which move and reduce tensors: `plane` is their interface, `planes` chooses one for each operation.

`shared_memory_plane` is the fastest on one host: tensors pass through rows of memory (`staging`) in steps
(`staged_steps`). `socket_plane` moves data between some of the members, `torch_backend` between hosts and on
accelerators, `xla` on devices of torch_xla, and `serial` to the same rank.
"""
