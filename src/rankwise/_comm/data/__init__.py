"""The data planes, which move and reduce tensors: `plane` is their interface, `planes` chooses one for each operation.

`shared_memory_plane` is the fastest on one host: tensors pass through rows of memory (`staging`) in steps
(`staged_steps`), or through pipes. `socket_plane` is for ranks that share no memory, `torch_backend` for several hosts
and accelerators, `xla` for devices of torch_xla, and `serial` for the same rank.
"""
