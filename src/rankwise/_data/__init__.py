"""Data on several ranks: `global_batches`, whose order is a `permutation`, `shards` of iterables, `steps` of loops over
loaders, and `ordered_results`, which puts results back into the order of a dataset.
"""
