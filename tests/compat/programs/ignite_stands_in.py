"""Ignite finds the drop-in wherever it imports its own module from."""

import importlib

import rankwise.compat.ignite as idist

idist.install()
idist.install()  # once more does nothing

ignite = importlib.import_module("ignite")
importlib.import_module("ignite.handlers")
importlib.import_module("ignite.contrib.engines.common")
precision = importlib.import_module("ignite.metrics.mean_average_precision")

assert ignite.distributed is idist
assert precision.idist is idist
assert precision.all_gather_tensors_with_shapes is idist.all_gather_tensors_with_shapes
models = ("base", "horovod", "native", "xla")
for name in ("auto", "launcher", "utils", "comp_models", *(f"comp_models.{model}" for model in models)):
    module = importlib.import_module(f"ignite.distributed.{name}")
    assert module is importlib.import_module(f"rankwise.compat.ignite.{name}")
idist.show_config()  # where logging is not set up, it shows itself
print("ok")
