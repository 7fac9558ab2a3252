"""Groups of ranks: `comm` has a group, `group` the handle that users have of it.

A group has a control plane (`control`), through which its members agree on a call, and data planes (`data`), which move
tensors after that. What both use: `reduce_ops` (the reductions), `dense_tensors` and `buffers` (tensors as bytes),
`shared_memory` (between processes of a host), `work` (the result of a call that was started without waiting).
"""
