"""Tests on the simulated device: collected where torch has it, as in `make test-accelerator`."""

from __future__ import annotations

import torch

from tests.accelerator.simdev.module import NAME

device = torch.accelerator.current_accelerator()
collect_ignore_glob = [] if device is not None and device.type == NAME else ["test_*.py"]
