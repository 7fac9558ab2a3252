"""The tests of `lane` need torch_xla: only `make test-xla` collects them."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torch_xla") else ["lane"]
