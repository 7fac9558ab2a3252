"""A plugin of pytest that runs PyTorch-Ignite's own tests for XLA on the drop-in: `make test-xla IGNITE=CHECKOUT`.

With several devices of the CPU it puts back the names that torch_xla has removed and these tests call: the original
cannot run on this torch_xla at all. The tests in `ignite_failures` have to fail.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr

import rankwise.compat.ignite as drop_in
import tests
from tests.xla.cpu_devices import support_collectives
from tests.xla.ignite_failures import CANNOT_PASS

DEVICES: Final = int(os.environ["CPU_NUM_DEVICES"])
_CHECKOUT: Final = Path(os.environ["IGNITE_CHECKOUT"])
_spawn: Final = xmp.spawn
# What a child runs: it is forked, and functions inside of functions cannot be pickled.
_calls: Final[list[tuple[Callable[..., Any], tuple[Any, ...]]]] = []

tests.__path__.append(str(_CHECKOUT / "tests"))  # Ignite's tests import each other as `tests.ignite`
drop_in.install()  # before Ignite is imported


def _run_rank(index: int, number: int) -> None:
    """Run a function on a device, and report its error: torch_xla only reports that the process is gone."""
    fn, args = _calls[number]
    try:
        fn(index, *args)
    except BaseException:  # noqa: BLE001 - reported
        traceback.print_exc()
        os._exit(1)


def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int | None = None, **_: Any) -> Any:
    """Start a rank on each device, as `xmp.spawn(fn, nprocs=DEVICES)` did in torch_xla before 2.7."""
    assert nprocs in {None, DEVICES}
    support_collectives()
    _calls.append((fn, args))
    return _spawn(_run_rank, args=(len(_calls) - 1,), start_method="fork")


if DEVICES > 1:
    xmp.spawn = spawn
    xm.get_ordinal, xm.xrt_world_size = xr.global_ordinal, xr.world_size


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the failures that are listed."""
    folder = _CHECKOUT / "tests" / "ignite" / "distributed"
    reasons = {(folder / file, name): reason for file, names, reason in CANNOT_PASS for name in names}
    for item in items:
        if reason := reasons.get((item.path, item.name.partition("[")[0])):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture(autouse=True)
def _ends_after_each_test() -> Iterator[None]:
    """Leave the session of a test that has failed."""
    yield
    drop_in.finalize()
