"""docs/api.md, made of the docstrings: `python -m tests.api_page` writes it, tests/test_docs.py compares it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import rankwise as rw

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
_HEAD = """# API

The public names of `rankwise`, in the groups of the [README](../README.md#what-there-is). `help(rankwise.NAME)` prints
the arguments, results and errors of each. *Local* functions do not communicate; *Collective* ones must be called by all
ranks. This page is made of the docstrings, by `python -m tests.api_page`.
"""


def page() -> str:
    """Return the page as it should be."""
    table = (ROOT / "README.md").read_text().partition("## What there is")[2].partition("\n- **")[0]
    text = _HEAD
    for title, names in re.findall(r"^\| ([^|]+) \| (`.*) \|$", table, re.MULTILINE):
        text += f"\n## {title[0].upper()}{title[1:]}\n"
        for name in re.findall(r"`(\w+)`", names):
            text += _entry(name)
    text += "\n## Classes and errors\n\n| name | meaning |\n| --- | --- |\n"
    for name in sorted(name for name in rw.__all__ if name[0].isupper()):
        text += f"| `{name}` | {_summary(getattr(rw, name))} |\n"
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
