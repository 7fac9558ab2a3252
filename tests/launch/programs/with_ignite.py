"""Joins and reduces under Ignite."""

import ignite.distributed as idist

idist.initialize("gloo")
ranks = idist.all_gather(idist.get_rank())
assert isinstance(ranks, list)
print(idist.get_world_size(), sorted(ranks), idist.get_local_rank() == idist.get_rank())
idist.finalize()
