"""Uses collectives where numpy cannot be imported."""

import sys
import warnings

sys.modules["numpy"] = None  # type: ignore[assignment]  # so that its import fails
warnings.simplefilter("ignore")  # torch's, of that

import torch  # noqa: E402

import rankwise as rw  # noqa: E402

assert rw.all_reduce({"a": torch.ones(2), "b": 1})["b"] == 1
assert rw.scatter([torch.ones(2)]).tolist() == [1, 1]
try:
    rw.all_reduce("text")
except rw.PayloadTypeError:
    print("refused")
