"""The collectives that users call, one file each: `reduce`, `reduce_to_one` and `reduce_scatter`, `all_gather`,
`rooted` (gather and broadcast), `scatter`, `all_to_all`, `point_to_point`, and `groups`, with the barrier.

Each checks its value in the block of a call, agrees, and moves data. What several share: `reduce_request` and
`in_place` (reductions), `pytree`, `scalars` and `numpy_arrays` (what is reduced), `serialization` and `out_of_band`
(values as bytes), `shared_values` and `memory_room` (large values through files), `non_blocking` (`async_op=True`).
"""
