"""docs/api.md, made of the docstrings: `python -m tests.api_page` writes it, tests/test_docs.py compares it."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Final

import rankwise as rw

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
_HEAD = """# API

The public names of `rankwise`. `help(rankwise.NAME)` prints the arguments, results and errors of each. *Local*
functions do not communicate; *Collective* ones must be called by all ranks. This page is made of the docstrings, by
`python -m tests.api_page`. Which names are public, and how long they stay: [versioning.md](versioning.md).

| group | names |
| --- | --- |
"""

# The functions, in the groups and the order of the page.
GROUPS: Final = {
    "identity (no communication)": "topology get_rank get_world_size get_local_rank get_local_world_size get_node_rank "
    "get_num_nodes is_rank_zero is_joined restart_count report_progress hostname device backend explain detect "
    "launchers",
    "initialization": "init finalize",
    "collectives (all ranks take part)": "all_reduce all_reduce_ reduce all_gather all_gather_cat gather broadcast "
    "scatter all_to_all reduce_scatter send recv barrier new_group node_group one_per_node_group",
    "training": "sync_grads no_sync sync_params sync_buffers assert_synced clip_grad_norm_ wrap_ddp "
    "seed same_seed random_streams random_state set_random_state rank_zero_only rank_zero_first one_rank_only "
    "in_rank_order print progress on_rank_zero",
    "key-value store": "store",
    "starting ranks": "launch",
}

# The other public modules that programs and packages import.
MODULES: Final = (
    "rankwise.data",
    "rankwise.launching",
    "rankwise.logging",
    "rankwise.extend.collectives",
    "rankwise.extend.launchers",
)


def page() -> str:
    """Return the page as it should be."""
    text = _HEAD
    for title, names in GROUPS.items():
        text += f"| {title} | {' '.join(f'[`{name}`](#{name})' for name in names.split())} |\n"
    for title, names in GROUPS.items():
        text += f"\n## {title[0].upper()}{title[1:]}\n"
        for name in names.split():
            text += _entry(name)
    text += "\n## Classes and errors\n\n| name | meaning |\n| --- | --- |\n"
    for name in sorted(name for name in rw.__all__ if name[0].isupper()):
        text += f"| `{name}` | {_summary(getattr(rw, name))} |\n"
    text += "\n## Modules\n\n| module | subject | names |\n| --- | --- | --- |\n"
    for name in MODULES:
        module = importlib.import_module(name)
        text += f"| `{name}` | {_summary(module)} | {' '.join(f'`{public}`' for public in module.__all__)} |\n"
    return text


def _entry(name: str) -> str:
    fn = getattr(rw, name)
    scope = re.search(r"^ *((?:Local|Collective)[^.:]*)[.:]", inspect.getdoc(fn) or "", re.MULTILINE)
    call = textwrap.fill(f"{name}{_signature(fn)}", 100, subsequent_indent="    ")
    return f"\n### {name}\n\n```text\n{call}\n```\n\n{_summary(fn)}" + (f" *{scope[1]}.*\n" if scope else "\n")


def _signature(fn: Callable[..., object]) -> inspect.Signature:
    """Return a signature without annotations, which are for type checkers."""
    signature = inspect.signature(fn)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def _summary(documented: object) -> str:
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
